from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from unisono.models.gpt_small import HEADS, LAYERS, WIDTH, Attention, GPTSmall


def test_modules_have_the_names_of_gpt_2() -> None:
    with torch.device("meta"):
        names = {name for name, _ in GPTSmall(256, 8).named_parameters()}
    block = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    modules = {f"h.{index}.{name}" for index in range(LAYERS) for name in block} | {"ln_f"}
    both = {f"{name}.{part}" for name in modules for part in ("weight", "bias")}
    assert names == both | {"wte.weight", "wpe.weight", "lm_head.weight"}


def test_no_token_depends_on_those_after_it() -> None:
    torch.manual_seed(0)
    model, tokens = GPTSmall(11, 6).double(), torch.randint(11, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_attention_is_the_softmax_of_products_over_the_past() -> None:
    torch.manual_seed(0)
    attention, x, size = Attention().double(), torch.randn(1, 5, WIDTH).double(), WIDTH // HEADS
    query, key, value = attention.c_attn(x)[0].split(WIDTH, dim=1)
    expected = torch.zeros(5, WIDTH).double()
    for head in range(HEADS):
        own = slice(head * size, (head + 1) * size)
        for place in range(5):
            weights = torch.softmax(key[: place + 1, own] @ query[place, own] / size**0.5, dim=0)
            expected[place, own] = weights @ value[: place + 1, own]
    torch.testing.assert_close(attention(x)[0], attention.c_proj(expected))


def test_before_training_all_tokens_are_alike_and_the_loss_falls() -> None:
    torch.manual_seed(0)
    model, tokens = GPTSmall(16, 12), torch.arange(13).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(10):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.log(torch.tensor(16.0)).item(), rel=0.1)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(2, 4), "not tokens"),
        (torch.zeros(2, 4, 4).long(), "not tokens"),
        (torch.zeros(2, 9).long(), "9 tokens, and 8"),
    ],
)
def test_other_inputs_are_refused_with_their_shape(inputs: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTSmall(16, 8)(inputs)
