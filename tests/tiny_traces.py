import pytest
import torch

from dspark_train.structures import DecodingTrace


def make_trace(rounds, temperatures, seed, *, shift=0.0, centre=1.2, domain="", sampling=1.0):
    """Rounds whose conditional acceptance is exactly σ((logit_k − shift) / temperature_k)."""
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.tensor(temperatures, dtype=torch.float64)
    shape = (rounds, len(temperatures))
    honest = centre + 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    kept = torch.rand(shape, generator=generator, dtype=torch.float64) < honest.sigmoid()
    accepted = kept.long().cumprod(1).sum(1)
    return DecodingTrace(
        request=torch.zeros(rounds, dtype=torch.int64),
        anchor=torch.arange(rounds),
        proposed=torch.zeros(shape, dtype=torch.int64),
        confidence_logits=(honest * temperatures + shift).float(),
        verify_length=torch.full((rounds,), len(temperatures)),
        accepted=accepted,
        committed=accepted + 1,
        temperature=sampling,
        domains=(domain,),
    )


@pytest.fixture
def trace():
    return make_trace
