"""Small decoder-only transformer for text (Radford et al. 2019, with its names; here 4 blocks of 4 heads, 128 wide).

    tokens ─ wte ─┐                ┌ ln_1 ─ attn ┐   ┌ ln_2 ─ mlp ┐
    places ─ wpe ─┴ sum ─ x ───────┴─────────────+ x ┴────────────+ x ─ ... four times ─ ln_f ─ lm_head ─ scores

A token attends to itself and to those before it:

    query    a b c d      a  ■              attn: softmax(q k' / sqrt(32)) v, for each head
                          b  ■ ■
                          c  ■ ■ ■
                          d  ■ ■ ■ ■

Layer norm comes first in each branch; lm_head has no bias and weights of its own. There is no dropout: small texts need
few epochs. For windows of 128 tokens and a vocabulary of 256 it has 875,264 parameters.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

LAYERS, HEADS, WIDTH = 4, 4, 128

INIT_STD = 0.02
"""Standard deviation of initial weights; those that end a branch have it divided by the square root of the branches."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention's output, (samples, tokens, WIDTH), for inputs of that shape."""
        samples, tokens, _ = x.shape
        heads = self.c_attn(x).view(samples, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        outputs: torch.Tensor = self.c_proj(mixed.transpose(1, 2).reshape(samples, tokens, WIDTH))
        return outputs


class MLP(nn.Module):
    """Two layers with a GELU between, four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.c_proj(self.gelu(self.c_fc(x)))
        return outputs


class Block(nn.Module):
    """Attention and MLP, each a branch beside the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        outputs: torch.Tensor = x + self.mlp(self.ln_2(x))
        return outputs


class GPTSmall(nn.Module):
    """Network from tokens, int64, (samples, tokens), to scores of the next ones, (samples, tokens, vocabulary)."""

    def __init__(self, vocabulary: int, tokens: int = 128) -> None:
        """Make the network for windows of at most `tokens` tokens."""
        super().__init__()
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.wpe = nn.Embedding(tokens, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=INIT_STD / sqrt(2 * LAYERS))
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores. Raises ValueError for inputs that are no tokens, or too many."""
        if tokens.is_floating_point() or tokens.ndim != 2:
            raise ValueError(f"inputs are {tokens.dtype} of shape {tuple(tokens.shape)}, not tokens, (samples, tokens)")
        if tokens.shape[1] > self.wpe.num_embeddings:
            raise ValueError(f"a sample has {tokens.shape[1]} tokens, and {self.wpe.num_embeddings} have a place")
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        scores: torch.Tensor = self.lm_head(self.ln_f(x))
        return scores
