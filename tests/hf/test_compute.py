"""What lies between the matrices of an expert, and when it may be computed again."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moeyard.runtime.hf.compute import _pure  # noqa: E402


class Experts(torch.nn.Module):
    expert_parameter_names = ("gate_up_proj", "down_proj")

    def __init__(self, act_fn):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 8, 4))
        self.down_proj = torch.nn.Parameter(torch.zeros(2, 4, 4))
        self.post_expert_norm = torch.nn.LayerNorm(4)
        self.act_fn = act_fn


def test_an_activation_that_trains_or_draws_is_not_computed_again():
    assert _pure(Experts(torch.nn.SiLU()))
    assert not _pure(Experts(torch.nn.PReLU()))
    assert _pure(Experts(torch.nn.PReLU()).requires_grad_(False))
    drops = Experts(torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1)))
    assert not _pure(drops)
    assert _pure(drops.eval())
    assert _pure(Experts(torch.nn.Dropout(0.0)))
