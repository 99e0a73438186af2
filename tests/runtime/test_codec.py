"""Experts that travel by a codec: lossless is as if there were none, and what a lossy one's receivers hold is what their homes know."""

from types import SimpleNamespace

import numpy as np
import pytest
from harness import cases_of, launch
from tests.slow_codec import to_bf16

torch = pytest.importorskip("torch")
from bench.codec_trial import Receivers, Trial  # noqa: E402

import moeyard as my  # noqa: E402
import moeyard.runtime as yr  # noqa: E402
from moeyard.errors import InvalidCluster, InvalidModel, UnknownName  # noqa: E402
from moeyard.reproduce.datacenters import one_bit  # noqa: E402
from moeyard.runtime.codec.coders import decode, encode  # noqa: E402
from moeyard.runtime.codec.copies import Exact, Near  # noqa: E402
from moeyard.runtime.codec.message import CHANGED, SAME, TAIL, kind_of, seal, sign, signed  # noqa: E402
from moeyard.runtime.codec.spec import Codec, by_layer, codec_of, coded_model  # noqa: E402
from moeyard.runtime.layers.ahead import choose_placement  # noqa: E402
from moeyard.runtime.options import Options  # noqa: E402

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]
LOSSY = ("residual:16", "bits:1", "bits:2", "pick:4", "pick:8", "pick:16", "pick:32", "topk:16")


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("width", [100, 3000, 70001])
def test_what_arrives_is_what_the_sender_says_receivers_hold(name, width):
    torch.manual_seed(width)
    codec, master = Codec.parse(name), torch.randn(width) * 0.05
    held = master + 1e-3 * torch.randn(width)
    receiver, words = held.clone(), torch.zeros(codec.words(width), dtype=torch.int32)
    before = (master - held).norm()
    encode(codec, master, held, words)
    seal(words, 3, CHANGED)
    weights = torch.empty(width, dtype=torch.bfloat16)
    decode(codec, receiver, words, weights)
    assert torch.equal(receiver, held)
    assert torch.equal(weights, held.bfloat16())
    assert (master - held).norm() < before


@pytest.mark.parametrize("name", [one for one in LOSSY if not one.startswith("residual")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_asks_for_an_anchor_until_it_is_gone(name, bad):
    torch.manual_seed(0)
    master = torch.randn(3000) * 0.05
    copy = Near(Codec.parse(name), master)
    copy.encode(master + 1e-4)
    assert not copy.strayed(master)
    for place in (0, 1500, 2999):
        broken = master.clone()
        broken[place] = bad
        ahead = Near(Codec.parse(name), master)
        ahead.encode(broken)
        assert ahead.strayed(broken)
        anchored = Near(Codec.parse(name), broken)
        anchored.encode(master)
        assert anchored.strayed(master)


def test_messages_take_the_bytes_they_say():
    width = 3 * 2048 * 1024
    times = {
        name: 2 * width / (4 * Codec.parse(name).words(width)) for name in ("bits:1", "pick:8", "pick:16")
    }
    assert times["bits:1"] > 15
    assert times["pick:8"] > 30
    assert times["pick:16"] > 45


def test_the_map_counts_what_the_codec_sends():
    for width in (1024, 3 * 2048 * 1024):
        assert one_bit(4 * width) == 4 * Codec.parse("bits:1").words(width) - 2 * (width // 1024 % 2)


@pytest.mark.parametrize("trial", [Trial("bits:1"), Trial("bits:2"), Trial("pick:8"), Trial("pick:16")])
def test_the_study_trains_with_what_the_runtime_decodes(trial):
    torch.manual_seed(0)
    masters = torch.randn(1, 1, 2, 4, 1024) * 0.05
    receivers = Receivers(masters, trial)
    copies = [Near(Codec.parse(trial.name), one.flatten().bfloat16()) for one in masters[0, 0]]
    for step in range(1, 5):
        masters += 1e-3 * torch.randn(masters.shape)
        held = receivers.follow(masters, step)
        for copy, master, other in zip(copies, masters[0, 0], held[0, 0], strict=True):
            copy.encode(master.flatten())
            # Means are summed in another order: scales may be one bf16 apart.
            assert torch.allclose(copy.held, other.flatten(), rtol=0, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_lossless_is_every_bit_of_any_dtype(dtype):
    torch.manual_seed(0)
    master = (torch.randn(5000) * 0.05).to(dtype)
    sender, receiver = Exact(master), Exact(master)
    for factor in (0.0, 1e-3, 1.0):
        master = master + (factor * torch.randn(5000)).to(dtype)
        receiver.decode(sender.encode(master))
        assert torch.equal(receiver.values(dtype), master)


def test_a_message_that_is_not_what_it_should_be_is_seen():
    words = torch.arange(200, dtype=torch.int32)
    seal(words, 5, SAME)
    assert kind_of(words, 5) == SAME
    assert kind_of(words, 6) == 0
    for place in (0, 1, 2, 3, 4, 100, 199):
        bad = words.clone()
        bad[place] ^= 1 << 9
        assert kind_of(bad, 5) == 0


def test_bf16_of_the_reference_is_torchs():
    values = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
    assert (to_bf16(values) == torch.from_numpy(values).bfloat16().float().numpy()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 12, 1001])
def test_an_anchor_that_is_not_what_was_signed_is_seen(dtype, width):
    rows = torch.zeros((3, width + TAIL), dtype=dtype)
    rows[:, :width] = torch.randn(3, width)
    for row in rows:
        sign(row)
        assert signed(row)
        for place in (0, width // 2, width - 1, width):  # the last: of the checksum itself
            bad = row.clone()
            bad.view(torch.uint8)[place * dtype.itemsize] ^= 1
            assert not signed(bad)


@pytest.mark.parametrize("name", ["bits:3", "pick:7", "topk:1", "topk:x", "zip", "", "bits:1@wan"])
def test_an_unknown_codec_is_refused(name):
    with pytest.raises(UnknownName):
        Codec.parse(name)


EXACT = [
    (("adamw", "foreach", "bf16 on float32 masters", 2, 2, True), {}),
    (("sgd", "plain", "float32", 2, 1, False), {"ahead": False, "resident": False}),
]
NEAR = {
    "residual:4": ("adamw", "plain", "float32", 2, 1, False),
    "bits:1,1=pick:8": ("adamw", "plain", "float32", 2, 1, False),
    "bits:1": ("adamw", "plain", "float32", 2, 2, True),
    "pick:8@all": ("adamw", "plain", "bf16 on float32 masters", 2, 1, False),
    "topk:8@all": ("sgd", "plain", "float32", 1, 2, False),
}


@pytest.fixture(scope="module")
def found(request):
    return launch("codec_cases:everything", 4, 240, exact=EXACT, near=NEAR, cases=cases_of(request))


@pytest.mark.long
@pytest.mark.cases("exact")
def test_lossless_changes_no_loss_by_a_bit(found):
    for rank in found:
        for plain, coded, _, compared in rank["exact"]:
            assert coded == plain
            assert compared > 0
    for number in range(len(EXACT)):
        assert sum(rank["exact"][number][2].get("messages", 0) for rank in found) > 0


@pytest.mark.long
@pytest.mark.cases("near")
def test_lossy_codecs_train_and_receivers_are_never_stale(found):
    """Every copy was compared with what its home says it holds, before every use."""
    for codec in NEAR:
        for rank in found:
            plain, coded, _, compared = rank["near"][codec]
            assert compared > 0
            assert coded != plain
            assert coded[-1] < coded[0]
            assert abs(coded[-1] / plain[-1] - 1) < 0.1
        tallies = [rank["near"][codec][2] for rank in found]
        assert sum(one.get("messages", 0) for one in tallies) > 0
        assert sum(one.get("anchors", 0) for one in tallies) > 0


@pytest.mark.long
@pytest.mark.parametrize("fault", ["a bit", "a version"])
@pytest.mark.cases("corrupted")
def test_a_wrong_message_is_followed_by_an_anchor(found, fault):
    for rank in found:
        mended = rank["corrupted"][fault]
        assert mended == found[0]["corrupted"][fault]
        assert [at for at, count in enumerate(mended) if count] == [4]


@pytest.mark.long
@pytest.mark.cases("damaged")
def test_a_damaged_anchor_is_sent_again_and_then_an_error(found):
    for rank in found:
        told = rank["damaged"]
        assert told["bits:1"] == told["lossless@all"] == [1, 0, 0]
        assert "arrived with other bits than were sent, twice" in told["twice"][0]
        assert told["twice"] == found[0]["damaged"]["twice"]
        assert told["twice"][1] == (0,)
        assert np.isfinite(told["after"])


@pytest.mark.long
@pytest.mark.cases("replaced")
def test_masters_that_are_loaded_anew_are_anchored(found):
    assert {rank["replaced"] for rank in found} == {found[0]["replaced"]}
    assert found[0]["replaced"] > 0


@pytest.mark.long
@pytest.mark.parametrize("codec", ["bits:1", "pick:8,0=lossless"])
def test_a_restart_anchors_anew_and_the_loss_goes_on(codec, tmp_path):
    """In processes of their own, on as many ranks and on fewer. Every copy is compared with what its home says before every use."""
    folder = str(tmp_path)
    whole = launch("codec_cases:trained", 4, 240, codec=codec, folder=folder, first=0, last=10, save=4)
    for world in (4, 2):
        again = launch("codec_cases:trained", world, 240, codec=codec, folder=folder, first=5, last=10)
        losses, anchored, compared = again[0]
        assert compared > 0
        assert anchored[0] > 0  # who has just started holds nothing
        # Receivers that were anchored are nearer to their homes than those that were not.
        assert losses == pytest.approx(whole[0][0][5:], rel=0.02)
        assert losses[-1] < whole[0][0][4]


@pytest.mark.long
def test_going_back_to_a_checkpoint_in_a_living_yard(tmp_path):
    losses, compared, mended = launch("codec_cases:gone_back", 4, 240, codec="bits:1", folder=str(tmp_path))[
        0
    ]
    assert compared > 0
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert mended[0] == 0
    assert min(mended[1:]) > 0
    assert losses[2] == losses[1]  # whatever receivers held, they start from anchors


@pytest.mark.long
def test_a_yard_says_what_a_codecs_copies_take():
    told = launch("codec_cases:room", 4, 120, codecs=["bits:1", "lossless", "residual:4", "1=pick:8"])
    expert = 3 * 32 * 32 * 4
    for codec, (said, *_) in told[0].items():
        layers = 1 if codec == "1=pick:8" else 2
        assert said == layers * expert * (2 + (codec == "residual:4"))  # one at home, one slot
    for rank in told:
        for said, taken, experts, _ in rank.values():
            assert taken <= said
            assert experts == 2 * 2 * expert * 2 + said  # replicas, their gradients, and these
    for codec in told[0]:
        assert max(rank[codec][1] for rank in told) > 0
    # by a message, an anchor or whole: every expert that crosses is counted, whatever carries it
    assert len({crossed for *_, crossed in told[0].values()}) == 1
    assert told[0]["bits:1"][3] > 0


@pytest.mark.long
@pytest.mark.cases("slower")
def test_who_holds_a_copy_keeps_it_when_the_network_changes(found):
    assert sum(rank["slower"][0] for rank in found) == 0
    assert sum(rank["slower"][1] for rank in found) > 0


@pytest.mark.long
@pytest.mark.cases("healed")
def test_receivers_are_finite_again_when_masters_are(found):
    for rank in found:
        for codec, (_, after) in rank["healed"].items():
            assert after == 0, codec
    for codec in found[0][
        "healed"
    ]:  # and see no more of it than there is: once at home, at most once elsewhere, on four ranks
        assert 1 <= sum(rank["healed"][codec][0] for rank in found) <= 4 * 4, codec


@pytest.mark.long
@pytest.mark.cases("again")
def test_the_same_parameters_are_held_as_the_same_bits(found):
    for rank in found:
        assert rank["again"][:2] == [True, True]
    assert not all(rank["again"][2] for rank in found)  # and a step moves them


def test_layers_may_have_codecs_of_their_own():
    text = Options(codec={2: "pick:8", 0: "lossless"}).codec
    assert text == "0=lossless,2=pick:8"
    assert codec_of(text, 2) == Codec("pick", 8)
    assert codec_of(text, 1) is None
    assert codec_of("bits:1,2=pick:8", 1) == Codec("bits", 1)
    assert Options(codec={}).codec is None
    for wrong in ("x=bits:1", "bits:1,pick:8", "1=bits:1,1=pick:8"):
        with pytest.raises(InvalidModel, match="codec"):
            by_layer(wrong)
    with pytest.raises(UnknownName):
        Options(codec={0: "bits:9"})
    with pytest.raises(InvalidModel, match="codec is 1"):
        Options(codec=1)


def test_plans_count_what_crosses():
    model = my.ModelSpec(row_bytes=512, expert_bytes=4 * 49152, expert_flops=2.0 * 49152, flops=1e9)
    found = Options(codec="bits:1", model=model).costed
    assert found.wan_expert_bytes == 4 * Codec.parse("bits:1").filled(49152)
    assert 30 < model.expert_bytes / found.wan_expert_bytes < 32  # of float32
    assert found.coding_seconds > 0
    assert found.but(wan_expert_bytes=model.expert_bytes, coding_seconds=0.0) == model
    assert Options(model=model).costed == model
    half = model.but(expert_bytes=2 * 49152)
    assert coded_model(half, "bits:1").wan_expert_bytes == found.wan_expert_bytes
    # the longest message counts for all; a layer that travels whole, or exactly, for more than any
    assert coded_model(model, "pick:16,1=bits:1").wan_expert_bytes == found.wan_expert_bytes
    for text in ("lossless", "1=bits:1", "bits:1,1=lossless"):
        assert coded_model(model, text) == model
    told = model.but(wan_expert_bytes=7)
    assert coded_model(told, "bits:1") == told


def test_a_yard_plans_for_what_its_codec_sends():
    """Experts too large to move whole, and small enough in a bit a value."""
    port = my.Port(1e9, 1e-6)
    cluster = my.Cluster(4, 2, port, port, datacenters=2, wan=my.Port(1e6, 1e-3))
    size = 4 * 196608
    model = my.ModelSpec(
        row_bytes=512, expert_bytes=size, expert_flops=size / 2, flops=1e12, gradient_bytes=4096
    )
    demand, home = my.Demand(np.full((8, 8), 40)), np.arange(8)
    whole, coded = (
        choose_placement(cluster, Options(planner="domains", model=model, codec=codec), demand, home)
        for codec in (None, "bits:1")
    )
    center = home // 4
    far = [(one.hosts_ER & (center[:, None] != center[None, :])).sum() for one in (whole, coded)]
    assert far[0] == 0
    assert far[1] > 0


def test_a_codec_that_cannot_serve_is_refused():
    port = my.Port(1e9, 0)
    alone, apart = my.Cluster(2, 2, port, port), my.Cluster(2, 2, port, port, datacenters=2, wan=port)
    Options(codec="bits:1").check_for(apart)
    Options(codec="bits:1@all").check_for(alone)
    for given, everywhere in (("bits:1", "bits:1@all"), ("bits:1@all,1=pick:8", "bits:1@all,1=pick:8@all")):
        with pytest.raises(InvalidCluster, match=everywhere):
            Options(codec=given).check_for(alone)
        Options(codec=everywhere).check_for(alone)


def test_what_is_refused_is_not_chosen():
    port = my.Port(1e9, 0)
    yard = object.__new__(yr.Yard)
    yard.options, yard.world = Options(), SimpleNamespace(cluster=my.Cluster(2, 2, port, port))
    with pytest.raises(InvalidCluster):
        yard.choose(codec="bits:1")
    assert yard.options.codec is None
