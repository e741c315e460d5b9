"""How much memory there is, and how much of it queries may take. Loads psutil on first use only."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

QUERY_BYTES = 2 * 1024**3  # of all queries of a process together; what takes more is spilled to disk
SHARE = 0.25  # of what the machine or the control group has, where that is less: training has the first claim
CGROUPS = Path("/proc/self/cgroup")  # lines "hierarchy:controllers:path"; version 2 has one, "0::path"
MOUNT = Path("/sys/fs/cgroup")


def query_bytes(available: int) -> int:
    """What queries get of the machine's or control group's memory."""
    return min(QUERY_BYTES, int(available * SHARE))


def memory_bytes(cgroups: Path = CGROUPS, mount: Path = MOUNT) -> int:
    """Bytes of memory for this process and the others of its control group.

    A limit of any ancestor holds too. "max" (version 2) and numbers beyond the machine (version 1) mean none.
    """
    import psutil

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
