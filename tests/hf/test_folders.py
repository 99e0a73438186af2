"""Hugging Face folders in and out: each rank reads its own share, plain transformers opens what is exported."""

import pytest
from rounds import play

pytest.importorskip("transformers")
pytestmark = [pytest.mark.runtime, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    folder = {"folder": str(tmp_path_factory.mktemp("folders"))}
    cases = [("write", 1, folder), ("through", 2, folder), ("trained", 4, folder), ("faults", 2, folder)]
    names = [name for name, _, _ in cases]
    return dict(zip(names, play(cases, 90, prepare="folder_cases"), strict=True))


def test_folder_to_ranks_to_folder_keeps_every_bit(rounds):
    assert len(rounds["through"][0]) == 4  # checked on the ranks, family by family


def test_a_rank_reads_exactly_its_share(rounds):
    for rank in rounds["through"]:
        for family, (read, own, total) in rank.items():
            assert read == own, family
            assert read < total, family


def test_the_exported_model_computes_what_the_ranks_do(rounds):
    assert max(rounds["trained"]) < 1e-12


def test_a_wrong_folder_is_one_line(rounds):
    for messages in rounds["faults"]:
        assert "neither model.safetensors.index.json nor model.safetensors" in messages["no folder"]
        assert "not a safetensors file" in messages["not safetensors"]
        assert "ends at byte" in messages["cut short"]
        assert "has shape" in messages["another width"]
        assert "missing" in messages["more layers"]
        assert "unknown to the model" in messages["fewer layers"]
        assert all("\n" not in message for message in messages.values())
