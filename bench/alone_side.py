"""The same work as a case in one process, without calls: `python -m bench.alone_side`."""

from __future__ import annotations

from bench.channel import Sample, die_with_parent, serve, take_stdout


def main() -> None:
    die_with_parent()
    reply_fd = take_stdout()
    import torch

    from bench.cases import CASES

    torch.set_num_threads(1)

    def prepare(name: str) -> Sample:
        alone = CASES[name].alone
        assert alone is not None
        return alone()

    serve(prepare, reply_fd)


if __name__ == "__main__":
    main()
