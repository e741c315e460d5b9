"""How much memory this process may use: the machine's, or its control group's where that is lower."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import psutil

CGROUPS = Path("/proc/self/cgroup")  # lines "hierarchy:controllers:path"; version 2 has one, "0::path"
MOUNT = Path("/sys/fs/cgroup")


def memory_bytes(cgroups: Path = CGROUPS, mount: Path = MOUNT) -> int:
    """Bytes of memory for this process and the others of its control group.

    A limit of any ancestor holds too. "max" (version 2) and numbers beyond the machine (version 1) mean none.
    """
    limits = [psutil.virtual_memory().total]
    for file in _limit_files(cgroups, mount):
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:
            limits.append(int(text))
    return min(limits)


def _limit_files(cgroups: Path, mount: Path) -> list[Path]:
    try:
        lines = cgroups.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux, no control groups
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the mount may show the group itself as its root, so the root's own file counts as well.
        group = PurePosixPath(path.lstrip("/"))
        files += [root / ancestor / name for ancestor in (group, *group.parents)]
    return files
