"""The stacks of a process that can't tell them, because it is stopped or holds the interpreter's lock. By py-spy.

Py-spy (the extra ``stacks``) reads the memory of the other process, which the system may forbid.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from farprop.protocol.inspection import Member
from farprop.transport.sockets import network_namespace

_SECONDS = 20.0


def dump(member: Member) -> str:
    """The stacks of a process of this host as text, or why there are none."""
    if member.net != network_namespace():
        return f"  It is on {member.host}: run farprop stacks there."
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return "  With py-spy its stacks could be read nevertheless: pip install 'farprop[stacks]'."
    # --nonblocking: a process that is stopped would not go on, and one that runs should not be stopped.
    command = [program, "dump", "--nonblocking", "--pid", str(member.pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"  py-spy could not read its stacks: {error}"
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return f"  py-spy could not read its stacks: {said[0] if said else f'exit code {done.returncode}'}"
    return "\n".join(f"  {line}" for line in done.stdout.splitlines())
