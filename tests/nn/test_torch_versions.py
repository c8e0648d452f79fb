import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outpace.nn import torch_versions
from outpace.parallel import why_not
from outpace.records.ranks import Ranks

ROOT = Path(__file__).parents[2]
# Names of torch that a version within the range lacks.
DIFFERENT = {
    "all_gather_into_tensor", "all_gather_single", "reduce_scatter_single", "reduce_scatter_tensor",
    "linear_cross_entropy", "LinearCrossEntropyOptions", "LaunchConfig", "loss_kwargs",
    "_fsdp_param_group", "_fsdp_param_groups", "_warmup_backward_result", "shutdown_timeout",
    "_get_grad_send_meta", "respect_saved_tensors_hooks",
}  # fmt: skip
# What files that ask for it have at least one of: the others need not be parsed.
_SIGNS = {"hasattr(", "getattr(", "__version__", "torch_version", *DIFFERENT}


def _sources():
    folders = ("outpace", "tests", "benchmarks", "examples")
    for path in sorted(one for folder in folders for one in (ROOT / folder).rglob("*.py")):
        # Programs of other trainers run with versions of their own.
        if path.name not in ("torch_versions.py", "test_torch_versions.py") and (
            "peers/programs" not in path.as_posix()
        ):
            text = path.read_text(encoding="utf-8")
            if "torch" in text and any(word in text for word in _SIGNS):
                yield path, ast.parse(text)


def _torch_names(tree):
    """The names by which a file calls torch and its modules, with what they stand for."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    known[one.asname or "torch"] = one.name if one.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return known


def _dotted(node, known):
    """What an expression such as `dist.all_reduce` stands for, if it is of torch."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join([known[node.id], *reversed(parts)])


def _asks(tree):
    """(Line, what): where a file asks torch for its version, or whether it has a name."""
    known = _torch_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            of = _dotted(node.args[0], known)
            default = node.func.id == "getattr" and len(node.args) == 3
            if of is not None and (node.func.id == "hasattr" or default):
                yield node.lineno, f"{node.func.id} of {of}"
        if isinstance(node, ast.Attribute) and _dotted(node, known) in (
            "torch.__version__", "torch.version.__version__", "torch.torch_version",
        ):  # fmt: skip
            yield node.lineno, "torch's version"
        used = {ast.Attribute: "attr", ast.keyword: "arg", ast.alias: "name"}.get(type(node))
        if used and getattr(node, used) in DIFFERENT and not _is_own(node, known):
            yield getattr(node, "lineno", 0), getattr(node, used)


def _is_own(node, known):
    """Whether a name is the module's own, and not torch's."""
    if isinstance(node, ast.alias):
        return node.name in ("all_gather_single", "reduce_scatter_single")
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id == "torch_versions" and node.value.id not in known)
    )


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nnew = torch.__version__ >= '2.13'",
        "import torch.distributed as dist\nhasattr(dist, 'all_gather_single')",
        "from torch.nn import functional as F\ngetattr(F, 'rms_norm', None)",
        "import torch.distributed as dist\ndist.reduce_scatter_single(out, part)",
        "schedule.step(tokens, loss_kwargs={})",
        "from torch.nn import LinearCrossEntropyOptions",
        "groups = state._fsdp_param_groups",
    ],
)
def test_what_asks_for_a_version_is_found(source):
    assert list(_asks(ast.parse(source)))


def test_nothing_else_asks_torch_for_its_version():
    found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path, tree in _sources()
             for line, what in _asks(tree)]  # fmt: skip
    assert not found, "\n".join(found)


def test_a_release_is_read_from_any_version():
    assert torch_versions.torch_release("2.11.0+cu130") == (2, 11)
    assert torch_versions.torch_release("2.15.0.dev20261101+cpu") == (2, 15)
    assert torch_versions.torch_release() >= (2, 11)


def test_a_stage_sends_zeros_for_an_input_without_gradient_on_every_version():
    """Before 2.13 torch raised, and the stage before it waited for ever."""
    sent, given = torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)
    received = (SimpleNamespace(buffer=sent), SimpleNamespace(buffer=given), SimpleNamespace())
    old = {"is_first": False, "args_recv_info": {0: received}}
    stage = SimpleNamespace(**old, bwd_cache={1: (sent, None, None, None)})
    torch_versions.fill_missing_gradients(stage, 1)
    one, zeros, root = stage.bwd_cache[1]  # what was given by name is not sent
    assert one is sent and root is None
    assert torch.equal(zeros, given) and zeros is not given and zeros.dtype == given.dtype
    torch_versions.fill_missing_gradients(stage, 2)  # a micro-batch whose backward is not done
    for changes in ({"is_first": True}, {"_get_grad_send_meta": None}):
        stage = SimpleNamespace(**old | changes, bwd_cache={0: (None,)})
        torch_versions.fill_missing_gradients(stage, 0)
        assert stage.bwd_cache == {0: (None,)}


def test_zero_bubble_schedules_are_refused_on_a_cpu_before_2_13(monkeypatch):
    monkeypatch.setattr(torch_versions, "torch_release", lambda: (2, 12))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for strategy in ("zb", "zbv", "dualpipev"):
        refused = why_not(strategy, Ranks(), cpu)
        assert (
            f"{strategy} computes the gradients" in refused and "--strategy interleaved" in refused
        )
        assert why_not(strategy, Ranks(), cuda) is None
    assert why_not("1f1b", Ranks(), cpu) is None
    monkeypatch.setattr(torch_versions, "torch_release", lambda: (2, 13))
    assert why_not("zbv", Ranks(), cpu) is None
