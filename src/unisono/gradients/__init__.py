"""The gradients of a model: where they lie, and how they meet while the backward pass goes on."""

from unisono.gradients.attachment import gradients_of
from unisono.gradients.control import asked_by
from unisono.gradients.exchange import Exchange
from unisono.gradients.gradients import Gradients

__all__ = ["Exchange", "Gradients", "asked_by", "gradients_of"]
