"""What a save promises, in one process: order, room, damage, values without a pickle. Ranks and homes: tests/hf/test_checkpoint.py."""

import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness import launch

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import moeyard.runtime as yr  # noqa: E402
from moeyard.errors import InvalidFile, NotSaved  # noqa: E402
from moeyard.runtime.agree.floor import Floor  # noqa: E402
from moeyard.runtime.state import checkpoint, logical, training_state  # noqa: E402
from moeyard.runtime.state.index import check_whole  # noqa: E402
from moeyard.runtime.state.logical import LogicalStack  # noqa: E402
from moeyard.runtime.state.values import decode, encode  # noqa: E402
from moeyard.runtime.transport.buffers import Workspace  # noqa: E402

pytestmark = pytest.mark.runtime
OLD = Path(__file__).resolve().parent.parent / "hf" / "written_by_0_1"


@pytest.fixture(scope="module")
def yard():
    """The role that a save asks for, played by one rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group = dist.group.WORLD
        yield SimpleNamespace(
            dense_control=group,
            floor=lambda call, behind=False: Floor(call, group),
            size=1,
            rank=0,
            workspace=Workspace(),
        )
        dist.destroy_process_group()


class Old(torch.nn.Module):
    """The parameters of the checkpoint that 0.1 wrote: each counts from 1000 times its number."""

    def __init__(self):
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(3, 8, 4))
        self.down = torch.nn.Parameter(torch.zeros(3, 4, 4))
        self.router = torch.nn.Linear(4, 3, bias=False)


def trained(width=8):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def contents(model, optimizer):
    found = [p.detach().clone() for p in model.parameters()]
    return found + [optimizer.state[p][k].clone() for p in model.parameters() for k in ("exp_avg", "step")]


def test_the_last_one_saved_is_there_and_the_latest_whatever_its_step(tmp_path, yard):
    model, optimizer = trained()
    for step in (150, 175, 200):
        yr.save_checkpoint(tmp_path, model, optimizer, yard, step=step)
    saved = yr.save_checkpoint(tmp_path, model, optimizer, yard, step=110)  # rolled back to 100, then on
    assert yr.latest(tmp_path) == saved == tmp_path / "step-00000110"
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"step-{s:08d}" for s in (110, 175, 200)]
    again = yr.save_checkpoint(tmp_path, model, optimizer, yard, step=110, keep=1)
    assert [one.name for one in tmp_path.iterdir()] == [again.name] == ["step-00000110-2"]


def test_an_old_one_that_cannot_be_removed_is_no_reason_to_call_the_new_one_unsaved(
    tmp_path, yard, monkeypatch
):
    model, optimizer = trained()
    far = yr.save_checkpoint(tmp_path / "far", model, optimizer, yard, step=1)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "step-00000001").symlink_to(far)
    for step in (2, 3):
        yr.save_checkpoint(folder, model, optimizer, yard, step=step, keep=2)
    assert sorted(one.name for one in folder.iterdir()) == ["step-00000002", "step-00000003"]
    assert yr.latest(tmp_path / "far") == far  # what a link leads to is not ours

    def refuse(path, **_):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("moeyard.runtime.state.folders.shutil.rmtree", refuse)
    for step in (4, 5):  # what the first leaves behind does not stop the second
        with pytest.warns(
            UserWarning, match=r"old-step-0000000\d.*cannot be removed: Operation not permitted"
        ):
            saved = yr.save_checkpoint(folder, model, optimizer, yard, step=step, keep=2)
        assert yr.latest(folder) == saved


@pytest.mark.parametrize("step", [-1, 1.9, "3", None])
def test_a_step_is_a_whole_number(tmp_path, yard, step):
    with pytest.raises(InvalidFile, match=r"step is .*whole number from 0"):
        yr.save_checkpoint(tmp_path, *trained(), yard, step=step)
    assert not list(tmp_path.iterdir())


def test_half_a_checkpoint_is_not_seen(tmp_path, yard):
    model, optimizer = trained()
    saved = yr.save_checkpoint(tmp_path, model, optimizer, yard, step=3)
    for name in ("step-00000004", ".saving-step-00000011", "other"):
        (tmp_path / name).mkdir()
    assert yr.latest(tmp_path) == saved
    assert yr.latest(tmp_path / "nowhere") is None


@contextmanager
def held_back(monkeypatch):
    """Writing begins only when the event is set."""
    go_on, write = threading.Event(), checkpoint._write

    def wait_and_write(*arguments):
        assert go_on.wait(20), "nobody let the write begin"
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "_write", wait_and_write)
    yield go_on
    monkeypatch.undo()


def test_a_save_behind_the_caller_has_what_was_there_when_it_was_asked_for(tmp_path, yard, monkeypatch):
    model, optimizer = trained()
    before = contents(model, optimizer)
    with held_back(monkeypatch) as go_on:
        saving = yr.start_checkpoint(tmp_path, model, optimizer, yard, step=1)
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
            optimizer.state[parameter]["step"].add_(5)
        assert not saving.done()
        go_on.set()
        saving.wait()
    yr.load_checkpoint(tmp_path, model, optimizer, yard)
    assert all(torch.equal(a, b) for a, b in zip(before, contents(model, optimizer), strict=True))


def test_memory_is_taken_again_and_never_while_it_is_read(tmp_path, yard):
    model, optimizer = trained()
    before = []
    for step in (1, 2, 3):
        for parameter in model.parameters():
            parameter.data.fill_(step)
        before.append(contents(model, optimizer))
        yr.start_checkpoint(tmp_path, model, optimizer, yard, step=step)  # nobody waits
    checkpoint._await_earlier()
    for step, expected in enumerate(before, 1):
        yr.load_checkpoint(tmp_path / f"step-{step:08d}", model, optimizer, yard)
        assert all(torch.equal(a, b) for a, b in zip(expected, contents(model, optimizer), strict=True))
    whole = sum(math.prod(one.shape) * one.element_size() for one in (*yr.read_tensors(tmp_path).values(),))
    assert whole <= checkpoint._staging.held_bytes <= 1.25 * whole + 64 * len(yr.read_tensors(tmp_path))


def test_the_next_save_waits_for_the_one_under_way(tmp_path, yard, monkeypatch):
    model, optimizer = trained()
    with held_back(monkeypatch) as go_on:
        saving = yr.start_checkpoint(tmp_path, model, optimizer, yard, step=1)
        threading.Timer(0.3, go_on.set).start()
        second = yr.start_checkpoint(tmp_path, model, optimizer, yard, step=2)
        assert saving.done(), "the second began while the first was being written"
        assert (saving.wait().name, second.wait().name) == ("step-00000001", "step-00000002")
    assert {one.name for one in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


def test_a_failed_save_that_nobody_waits_for_is_told_of_by_the_next(tmp_path, yard):
    model, optimizer = trained()
    (tmp_path / "file").write_text("in the way")
    yr.start_checkpoint(tmp_path / "file", model, optimizer, yard, step=1)
    with pytest.warns(UserWarning, match=r"was not saved, and nobody waited for it: .*file"):
        yr.save_checkpoint(tmp_path / "run", model, optimizer, yard, step=2)
    heard = yr.start_checkpoint(tmp_path / "file", model, optimizer, yard, step=3)
    with pytest.raises(NotSaved):
        heard.wait()
    # Not told twice: pytest turns a warning into an error.
    yr.save_checkpoint(tmp_path / "run", model, optimizer, yard, step=4)


OTHER_KINDS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.5),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.5),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5),
}


def forget_kinds(monkeypatch):
    """Save as versions did that told no kind."""
    groups = training_state._groups

    def without(model, optimizer):
        return [
            {k: v for k, v in one.items() if k != training_state.KIND} for one in groups(model, optimizer)
        ]

    monkeypatch.setattr(training_state, "_groups", without)


@pytest.mark.parametrize(
    ("kind", "told"),
    [(kind, told) for kind in OTHER_KINDS for told in (True, False) if told or kind != "Adam"],
)  # Adam's options are AdamW's: only the name tells them apart
def test_another_kind_of_optimizer_is_refused_before_anything_is_touched(
    tmp_path, yard, monkeypatch, kind, told
):
    if not told:
        forget_kinds(monkeypatch)
    yr.save_checkpoint(tmp_path, *trained(), yard, step=1)
    model, _ = trained()
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    other = OTHER_KINDS[kind](model.parameters())
    says = f"of another kind of optimizer: of 'AdamW', given {kind};" if told else f"betas.* as {kind} has;"
    with pytest.raises(InvalidFile, match=says):
        yr.load_checkpoint(tmp_path, model, other, yard)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("told", [True, False])
def test_options_beside_the_kinds_own_are_no_other_kind(tmp_path, yard, monkeypatch, told):
    """A scheduler's, a user's, names of parameters, and those that an older torch had not yet."""
    if not told:
        forget_kinds(monkeypatch)
    model, optimizer = trained()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    optimizer.param_groups[0] |= {"lr_scale": 0.5, "param_names": ["a", "b"]}
    optimizer.param_groups[0].pop("decoupled_weight_decay", None)
    yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1)
    yr.load_checkpoint(tmp_path, *trained(), yard)


def test_a_wrapped_optimizer_is_of_the_kind_that_it_wraps(tmp_path, yard):
    class Wrapper(torch.optim.Optimizer):
        """As accelerate's: everything is the other's."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def state_dict(self):
            return self.optimizer.state_dict()

        def load_state_dict(self, state):
            self.optimizer.load_state_dict(state)

    model, optimizer = trained()
    yr.save_checkpoint(tmp_path, model, Wrapper(optimizer), yard, step=1)
    yr.load_checkpoint(tmp_path, model, optimizer, yard)
    yr.load_checkpoint(tmp_path, model, Wrapper(optimizer), yard)


def test_a_child_that_is_forked_during_a_save_ends(tmp_path, yard, monkeypatch):
    with held_back(monkeypatch) as go_on:
        saving = yr.start_checkpoint(tmp_path, *trained(), yard, step=1)
        child = os.fork()
        if child == 0:
            os._exit(len(checkpoint._under_way))  # what would be waited for at the end
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        saving.wait()


def test_no_room_is_an_error_and_the_old_ones_stay(tmp_path, yard):
    model, optimizer = trained(64)
    saved = yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # the system refuses what is longer
    try:
        with pytest.raises(NotSaved) as refused:
            yr.save_checkpoint(tmp_path, model, optimizer, yard, step=2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path) in str(refused.value)
    # parameters and two averages in float32, four steps, and the generators of torch (5056) and numpy (624 x uint32)
    size = 3 * 4 * (64 * 64 + 64 + 3 * 64 + 3) + 4 * 4 + 5056 + 4 * 624
    assert f"{size} bytes" in str(refused.value)
    assert [one.name for one in tmp_path.iterdir()] == [saved.name]
    assert yr.load_checkpoint(tmp_path, model, optimizer, yard).step == 1


def test_what_cannot_be_saved_is_named_and_nothing_is_left(tmp_path, yard):
    model, optimizer = trained()
    with pytest.raises(NotSaved, match=r"rank 0: extra\.loader: .* neither plain data nor a tensor"):
        yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1, extra={"loader": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["checkpoint.json", "index.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_an_error(tmp_path, yard, file, damage):
    model, optimizer = trained()
    path = yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1) / file
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 20)):
        if damage == "gone":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(content[:place])
        else:
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(
            InvalidFile, match=path.parent.name if file != "checkpoint.json" else str(tmp_path)
        ):
            yr.load_checkpoint(tmp_path, model, optimizer, yard)
        path.write_bytes(content)
    assert yr.load_checkpoint(tmp_path, model, optimizer, yard).step == 1


def test_no_bit_of_a_file_can_change_unseen(tmp_path, yard):
    """Its front too, by which other programs read it: every byte of it, one bit each, and two hundred of the rest."""
    model, optimizer = trained()
    path = yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1)
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    front = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(0)
    for at in [*range(front), *(chance.randrange(front, len(content)) for _ in range(200))]:
        changed = bytearray(content)
        changed[at] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(InvalidFile, match=r"rank-00000\.safetensors"):
            yr.read_tensors(path)
    file.write_bytes(content)
    assert yr.read_tensors(path)


def test_no_pickle_is_read_unless_asked_for(yard):
    model = Old()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InvalidFile, match=r"pickles.*allow_pickle=True"):
        yr.load_checkpoint(OLD, model, optimizer, yard)
    extra, state = {"seen": None}, (random.getstate(), torch.get_rng_state())
    with pytest.warns(UserWarning, match="can run anything"):
        found = yr.load_checkpoint(OLD, model, optimizer, yard, extra=extra, allow_pickle=True)
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    assert (found.step, found.extra["seen"], list(found.homes[""])) == (7, 123, [0, 0, 0])
    for number, parameter in enumerate(model.parameters()):
        values = torch.arange(float(parameter.numel())).reshape(parameter.shape) + 1000 * number
        assert torch.equal(parameter, values)
        assert torch.allclose(optimizer.state[parameter]["exp_avg"], torch.full_like(parameter, 0.1))


def test_objects_come_back_without_a_pickle(tmp_path, yard):
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    optimizer.step()
    schedule.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    plain = {"text": "é", "nan": math.nan, "pair": (1, 2.5), "bytes": b"\x00\xff", "keys": {3: None, (1, 2): True},
             "array": np.arange(6).reshape(2, 3)[:, ::2], "scalar": np.float32(0.1), "dtype": torch.bfloat16, "set": {1, 5},
             "big": 2**80, "tensors": [torch.tensor(3), torch.ones(0, 4), torch.ones(2, dtype=torch.complex64)]}  # fmt: skip
    extra = {"schedule": schedule, "plain": plain}
    yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1, extra=extra, per_rank={"at": [7]})
    draws = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9])
    found = yr.load_checkpoint(
        tmp_path, model, optimizer, yard, extra={"schedule": schedule, "plain": None}, per_rank={"at": None}
    ).extra["plain"]
    assert torch.equal(draws[0], torch.rand(3))
    assert draws[1:] == (random.random(), np.random.rand())  # noqa: NPY002
    assert schedule.milestones == Counter({2: 2, 5: 1})
    assert isinstance(schedule.milestones, Counter)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.25)
    assert math.isnan(found.pop("nan"))
    assert (found.pop("array") == plain["array"]).all()
    assert found.pop("scalar") == plain["scalar"]
    tensors = found.pop("tensors")
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, plain["tensors"], strict=True)
    )
    assert found == {key: plain[key] for key in found}
    assert isinstance(found["pair"], tuple)


def test_numbers_are_kept_to_the_last_bit(tmp_path, yard):
    chance = random.Random(3)
    numbers = [chance.uniform(-1, 1) * 10.0 ** chance.randint(-300, 300) for _ in range(2000)]
    numbers += [5e-324, -0.0, 1.7976931348623157e308, 0.1]
    model, optimizer = trained()
    yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1, extra={"n": numbers})
    found = yr.load_checkpoint(tmp_path, model, optimizer, yard, extra={"n": None}).extra["n"]
    assert [one.hex() for one in found] == [one.hex() for one in numbers]


@pytest.mark.parametrize("bad", [{"tuple": 3}, {"float": "7"}, {"dtype": "nn"}, {"x": 1}, {}, {"bytes": "é"}, {"pairs": [1]},
                                 {"set": [[1]]}, {"tensor": ["a"]}, {"device": "nowhere"}, {"pairs": [[[1], 2]]}])  # fmt: skip
def test_a_value_that_is_none_is_named(bad):
    with pytest.raises(InvalidFile, match="here"):
        decode("here", [bad], {}.__getitem__)


def test_what_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(NotSaved, match="deep"):
        encode("extra.x", value, {})


@pytest.mark.parametrize("seed", range(4))
def test_any_experts_of_a_stack_saved_in_pieces_are_read_and_no_others(tmp_path, yard, monkeypatch, seed):
    chance = random.Random(seed)
    monkeypatch.setattr(logical, "PIECE_BYTES", chance.choice([8, 100, 1000]))
    model = torch.nn.Linear(5, 12)
    yr.save_checkpoint(tmp_path, model, None, yard, step=1)
    whole = yr.read_tensors(tmp_path)["model.weight"]
    assert torch.equal(whole, model.weight)
    own = tuple(chance.sample(range(12), 5))
    stack = LogicalStack(torch.full((5, 5), math.nan), own, 12)
    found = tmp_path / "step-00000001"
    stored = checkpoint._open(found, checkpoint.read_about(found), None, False)
    stored.fill({"model.weight": stack})
    assert torch.equal(stack.local, whole[list(own)])


@pytest.mark.parametrize("seed", range(30))
def test_pieces_that_leave_a_gap_or_meet_are_refused(seed):
    """Against counting every value."""
    chance = np.random.default_rng(seed)
    shape = tuple(chance.integers(1, 4, chance.integers(1, 3)).tolist())
    boxes, counts = [], np.zeros(shape, int)
    while counts.min() == 0:
        offset = [int(chance.integers(0, n)) for n in shape]
        size = [int(chance.integers(1, n - a + 1)) for n, a in zip(shape, offset, strict=True)]
        part = tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))
        if counts[part].any() and chance.random() < 0.98:
            continue
        boxes.append((tuple(offset), tuple(size)))
        counts[part] += 1
        if chance.random() < 0.03:
            break
    if (counts == 1).all():
        check_whole("here", shape, boxes)
    else:
        with pytest.raises(InvalidFile, match="here"):
            check_whole("here", shape, boxes)


def test_a_plain_safetensors_reader_opens_the_files(tmp_path, yard):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = trained()
    path = yr.save_checkpoint(tmp_path, model, optimizer, yard, step=1)
    found = safetensors.load_file(path / "rank-00000.safetensors")
    assert torch.equal(found["model.0.weight"], model[0].weight)
    index = json.loads((path / "index.json").read_text())
    assert set(index["tensors"]) == set(found)


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 gathers on CUDA alone")
def test_shards_of_fsdp_come_back_on_other_numbers_of_ranks(tmp_path):
    saved = launch("save_cases:shards", 3, 60, folder=str(tmp_path), save=True)
    assert saved[0] == saved[1] == saved[2]
    for ranks in (2, 3):
        assert launch("save_cases:shards", ranks, 60, folder=str(tmp_path), save=False) == [saved[0]] * ranks


def test_ranks_do_not_import_what_only_old_checkpoints_and_measuring_need():
    """A second and a half on every rank, before the first step."""
    code = "import sys, moeyard.runtime; print([m for m in ('torch.distributed.checkpoint', 'torch.distributed.tensor', 'scipy.optimize') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
