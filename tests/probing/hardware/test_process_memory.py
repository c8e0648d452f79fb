import pytest
import torch

from outpace.probing.hardware.process_memory import anonymous_bytes, find_cgroup, give_back_free

MOUNT = "35 31 0:32 {root} {place} rw - {kind} {kind} rw,memory\n"


def tree(tmp_path, kind, membership, root, files):
    """A system's files, as far as limits are looked up in them."""
    top = tmp_path / "mounted"
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "mountinfo").write_text(MOUNT.format(root=root, place=top, kind=kind))
    (tmp_path / "cgroup").write_text(membership)
    return find_cgroup(tmp_path / "cgroup", tmp_path / "mountinfo")


def test_the_least_limit_up_the_tree_counts(tmp_path):
    files = {
        "memory.max": 9000,
        "job/memory.max": 5000,
        "job/memory.current": 3000,
        "job/memory.stat": "anon 2000\nactive_file 300\ninactive_file 200\nfile 900",
        "job/step/memory.max": "max",
    }
    group = tree(tmp_path, "cgroup2", "1:pids:/x\n0::/job/step\n", "/", files)
    assert (group.folder.name, group.limit_bytes, group.used_bytes()) == ("job", 5000, 2500)


def test_version_1_and_a_containers_view(tmp_path):
    files = {
        "memory.limit_in_bytes": 7000,
        "memory.usage_in_bytes": 4000,
        "memory.stat": "active_file 1\ntotal_active_file 500\ntotal_inactive_file 500",
    }
    group = tree(tmp_path, "cgroup", "4:memory:/docker/abc\n3:cpu:/y\n", "/docker/abc", files)
    assert (group.limit_bytes, group.used_bytes()) == (7000, 3000)


@pytest.mark.parametrize("limit", [2**63 - 4096, 9223372036854771712])
def test_without_a_limit_there_is_none(tmp_path, limit):
    files = {"a/memory.limit_in_bytes": limit}
    assert tree(tmp_path, "cgroup", "4:memory:/a\n", "/", files) is None
    assert find_cgroup(tmp_path / "nothing", tmp_path / "nothing") is None


def test_anonymous_memory_grows_by_what_is_written_and_falls_when_it_is_free():
    give_back_free()
    before = anonymous_bytes()
    tensors = [torch.ones(16, 1024) for _ in range(2048)]  # 64 KiB each: in the C library's heap
    held = anonymous_bytes()
    assert held - before > 100 << 20
    del tensors
    give_back_free()
    assert anonymous_bytes() - before < 32 << 20
