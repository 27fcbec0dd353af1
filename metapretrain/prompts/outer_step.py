"""An outer step of prompt MAML, recorded as a CUDA graph where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.prompts.batch import PromptBatch, check_tasks
from metapretrain.prompts.replay import Replay

if TYPE_CHECKING:
    from metapretrain.prompts.learner import PromptMAML

LEAVES = 4  # tensors of labelled rows


class OuterStep:
    """:meth:`PromptMAML.backward`; on a GPU each shape of rows is recorded at its third call and replayed from then on.

    Starting the kernels of two passes through a language model takes longer than computing them for few rows. Steps,
    order, chunk and rates that are numbers are those of the recording; the prompt and learned rates are read anew.

    Args:
        learner: the prompt and the model; both stay where they are in memory.
        context: called before each step for the context of its precision, such as autocast.

    Raises:
        InputError: no PromptMAML, one without anything to learn, inner rates that come from further computations, which
            a recorded step would miss; when called, rows that :meth:`PromptMAML.backward` refuses.

    Example:
        >>> from transformers import BertForMaskedLM
        >>> from metapretrain.models.tiny_text import tiny_model, tiny_tokenizer
        >>> from metapretrain.prompts import PromptMAML, PromptTemplate, SoftPrompt, Verbalizer
        >>> tokenizer = tiny_tokenizer()
        >>> bert, words = BertForMaskedLM(tiny_model(len(tokenizer)).config), Verbalizer(["no", "ok"], tokenizer)
        >>> maml = PromptMAML(bert, SoftPrompt.random(5, 32), PromptTemplate("It is <X>."), words)
        >>> data = maml.encode(["a film", "a plot", "a song", "a book"], labels=[0, 1, 1, 0])
        >>> step = OuterStep(maml)
        >>> step(data.take(torch.tensor([[0], [1]])), data.take(torch.tensor([[2], [3]]))).shape
        torch.Size([2])
        >>> maml.prompt.weight.grad.shape
        torch.Size([5, 32])
    """

    def __init__(self, learner: PromptMAML, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        if not hasattr(learner, "prompted"):
            raise InputError(f"an outer step is that of a PromptMAML, not of a {type(learner).__name__}")
        tensors = (learner.prompt.weight, learner.inner_lr)
        learned = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
        if not learned:
            raise InputError("nothing is learned: the prompt takes no gradient, and inner_lr is no tensor that does")
        if not all(tensor.is_leaf for tensor in learned):
            raise InputError("inner_lr comes from further computations; learn a tensor, or use PromptMAML.backward")
        self.learner, self.context, self.learned = learner, context, learned
        self.replay = Replay(self._gradients)

    def __call__(self, support: PromptBatch, query: PromptBatch) -> Tensor:
        """Add the gradient of the outer loss to ``.grad``; losses (K,) of support rows (K, m) and query rows (K, q)."""
        check_tasks("support", support)
        check_tasks("query", query)
        losses, *gradients = self.replay(*support.leaves(), *query.leaves())
        for parameter, gradient in zip(self.learned, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return losses

    def _gradients(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        outside = [parameter.grad for parameter in self.learned]
        for parameter in self.learned:  # gradients would be added in place
            parameter.grad = None
        try:
            with self.context():
                losses = self.learner.backward(PromptBatch.of(*leaves[:LEAVES]), PromptBatch.of(*leaves[LEAVES:]))
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.learned]
        finally:
            for parameter, gradient in zip(self.learned, outside, strict=True):
                parameter.grad = gradient
        return losses, *found
