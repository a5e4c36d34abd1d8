"""``torch.distributed.optim`` under ``farprop.compat``: ``DistributedOptimizer`` is farprop's, the rest is torch's."""

from __future__ import annotations

from pathlib import Path

from tests.test_compat import run, run_after_install

CHECKS = """
import sys
import torch.distributed.optim
import torch.distributed.optim.optimizer as module
from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer
from torch.distributed.optim.optimizer import DistributedOptimizer as again
import farprop.optim

assert module is farprop.optim.optimizer is torch.distributed.optim.optimizer
assert module.__spec__.name == module.__name__ == "farprop.optim.optimizer"
assert DistributedOptimizer is again is torch.distributed.optim.DistributedOptimizer
assert DistributedOptimizer is farprop.optim.DistributedOptimizer
assert ZeroRedundancyOptimizer.__module__ == "torch.distributed.optim.zero_redundancy_optimizer"
assert torch.distributed.optim.PostLocalSGDOptimizer.__module__.startswith("torch.")
assert torch.distributed.optim._FunctionalSGD is torch.distributed.optim.functional_sgd._FunctionalSGD
"""


def test_imported_after_install(tmp_path: Path) -> None:
    # It takes seconds to import, so install() does not import it.
    run_after_install('import sys\nassert "torch.distributed.optim" not in sys.modules\n' + CHECKS, tmp_path)


def test_imported_before_install(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import inspect\n"
        "from torch.distributed.optim import DistributedOptimizer as theirs\n"
        "import farprop.compat\n"
        "farprop.compat.install()\n"
        + CHECKS
        + "for name in ('__init__', 'step'):\n"
        + "    pair = [inspect.signature(getattr(c, name)).parameters for c in (theirs, DistributedOptimizer)]\n"
        + "    assert theirs is not DistributedOptimizer\n"
        + "    ours = [(p.name, p.kind) for p in pair[1].values() if p.name not in ('consistency', 'more')]\n"
        + "    assert [(p.name, p.kind) for p in pair[0].values()] == ours\n"
    )
    run(str(script), cwd=tmp_path)
