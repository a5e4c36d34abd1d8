"""Two organisations train one model. Neither shows the other its data, its half of the model, or its code.

A laboratory has measured cells of 569 patients, and has the lower half of the model. A hospital has their diagnoses,
and the upper half. They exchange activations, gradients, losses and accuracies: what can be learned from these, the
other side can learn. The job is restricted, so each can only call what the other exposes, by names that they have
agreed on, and nothing that arrives is unpickled. They talk through TLS, and each shows a certificate of an authority
that both trust. Here both programs are in one file; in a real job each organisation has its own, on its own host.

The data are the breast cancer data of scikit-learn.
"""

import argparse
import datetime
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor, nn

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import NotExposedError

MEASUREMENTS, WIDTH, TESTED = 30, 8, 169


class Party:
    """One organisation's half of the model, with an optimizer of its own."""

    def __init__(self, half: nn.Module) -> None:
        self.half = half
        self.optimizer = torch.optim.Adam(half.parameters(), lr=0.003)

    def step(self, context_id: int) -> None:
        """Take an optimizer step with the gradients that a backward pass has left in the context."""
        gradients = dist_autograd.get_gradients(context_id)
        for parameter in self.half.parameters():
            parameter.grad = gradients[parameter]
        self.optimizer.step()


# The hospital, and the functions that it exposes. It checks what it gets, as anybody's form is checked.

hospital: Party
diagnoses: Tensor


@rpc.expose(name="loss")
def loss_of(activations: Tensor, patients: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores_of(activations, patients), diagnoses[patients])


@rpc.expose(name="step")
def step(context_id: int) -> None:
    hospital.step(context_id)


@rpc.expose(name="accuracy")
@torch.no_grad()
def accuracy(activations: Tensor, patients: Tensor) -> float:
    return (scores_of(activations, patients).argmax(1) == diagnoses[patients]).float().mean().item()


def scores_of(activations: Tensor, patients: Tensor) -> Tensor:
    if patients.dtype != torch.int64 or activations.shape != (len(patients), WIDTH):
        raise ValueError(f"expected patients' numbers, and {WIDTH} activations for each")
    if len(patients) < 100:  # the accuracy of one patient would be the diagnosis
        raise ValueError("expected 100 patients or more")
    return hospital.half(activations)


def open_hospital() -> None:
    from sklearn.datasets import load_breast_cancer

    global hospital, diagnoses
    hospital = Party(nn.Linear(WIDTH, 2))
    diagnoses = torch.tensor(load_breast_cancer().target)


# The laboratory. It exposes nothing.


def train(steps: int) -> None:
    from sklearn.datasets import load_breast_cancer

    measured = torch.tensor(load_breast_cancer().data, dtype=torch.float32)
    tested, trained = torch.randperm(len(measured)).split([TESTED, len(measured) - TESTED])
    measured = (measured - measured[trained].mean(0)) / measured[trained].std(0)
    laboratory = Party(nn.Sequential(nn.Linear(MEASUREMENTS, WIDTH), nn.Tanh()))

    def share_of_right() -> float:
        return rpc.rpc_sync("hospital", "accuracy", args=(laboratory.half(measured[tested]).detach(), tested))

    for number in range(1, steps + 1):
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("hospital", "loss", args=(laboratory.half(measured[trained]), trained))
            dist_autograd.backward(context_id, [loss])
            rpc.rpc_sync("hospital", "step", args=(context_id,))
            laboratory.step(context_id)
        if number % 10 == 0:
            print(f"step {number:3}  loss {loss.item():.3f}  right {share_of_right():6.1%}", flush=True)
    for attempt in ("os:system", f"{__name__}:open_hospital"):
        try:
            rpc.rpc_sync("hospital", attempt)
        except NotExposedError as error:
            print("refused:", str(error).split(".")[0], flush=True)
    print(f"{share_of_right():.1%} of {TESTED} patients that were not trained on are diagnosed correctly.", flush=True)


# Starting both. What they need to meet: a secret, and certificates.


def organisation(rank: int, place: Path, steps: int) -> None:
    torch.manual_seed(rank)
    name = ("laboratory", "hospital")[rank]
    os.environ |= {
        "FARPROP_SECRET_FILE": str(place / "secret"),
        "FARPROP_TLS_CERT": str(place / f"{name}.crt"),
        "FARPROP_TLS_KEY": str(place / f"{name}.key"),
        "FARPROP_TLS_CA": str(place / "authority.crt"),
        "FARPROP_TRANSPORT": "tcp",  # as between hosts; workers of one host would use Unix sockets, without TLS
    }
    if name == "hospital":
        open_hospital()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/meeting-point")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options, restricted=True)
    if name == "laboratory":
        train(steps)
    rpc.shutdown()  # the hospital waits here, and answers calls, until the laboratory calls it, too


def prepare(place: Path) -> None:
    """Write the secret, and a certificate for each. In a real job an authority makes them, and keys stay at home."""
    secret = os.open(place / "secret", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(secret, secrets.token_hex(32).encode())
    os.close(secret)
    authority = ec.generate_private_key(ec.SECP256R1())
    for name in ("authority", "laboratory", "hospital"):
        key = authority if name == "authority" else ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = x509.CertificateBuilder(
            x509.Name.from_rfc4514_string("CN=authority"),
            x509.Name.from_rfc4514_string(f"CN={name}"),
            key.public_key(),
            x509.random_serial_number(),
            now - datetime.timedelta(hours=1),
            now + datetime.timedelta(days=1),
        ).add_extension(x509.BasicConstraints(ca=key is authority, path_length=None), critical=True)
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (place / f"{name}.crt").write_bytes(certificate.sign(authority, hashes.SHA256()).public_bytes(pem))
        if key is not authority:
            key_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
            (place / f"{name}.key").write_bytes(key_pem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of training (default: 100)")
    steps = parser.parse_args().steps
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the two share the cores
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by both: main ends them on Ctrl-C
        both = mp.spawn(organisation, args=(Path(directory), steps), nprocs=2, join=False)
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            while not both.join():
                pass
        except KeyboardInterrupt:
            for process in both.processes:
                process.terminate()
                process.join()
            print("Stopped.")
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
