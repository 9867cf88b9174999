"""The losses: next-token cross-entropy, and the drafts' cross-entropy against the main model's own distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Tokens
from .model import TrainingModel

Z_LOSS = 1e-4  # keeps the logits' normaliser near one, so that bf16 logits stay fine-grained
DRAFT_WEIGHTS = (0.30, 0.20, 0.15)  # of the three drafts, beside 1 for the main model


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(cross-entropy [N] in nats, squared log normaliser [N]) of hidden [N, h] against targets [N]."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    normaliser = logits.logsumexp(-1)
    return normaliser - logits.gather(-1, targets[:, None])[:, 0], normaliser.square()


def draft_loss(student: Tensor, teacher: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """(cross-entropy of the draft against the main model's distribution [N], whether their greedy tokens agree [N])."""
    head = head.to(student.dtype)
    drafted = F.linear(student, head).float()
    wanted = F.linear(teacher, head).float().detach()
    loss = drafted.logsumexp(-1) - (wanted.softmax(-1) * drafted).sum(-1)
    return loss, drafted.argmax(-1) == wanted.argmax(-1)


def unlikelihood(next_token: Tensor) -> Tensor:
    """-log(1 - p) of tokens whose cross-entropy -log p is given; its gradient on a logit is at most 1."""
    return -torch.log(-torch.expm1(-next_token.clamp_min(1e-5)))


@dataclass
class LossFunctions:
    """The two losses, as they are or compiled."""

    next_token: Callable[..., tuple[Tensor, Tensor]] = next_token_loss
    draft: Callable[..., tuple[Tensor, Tensor]] = draft_loss

    @classmethod
    def compiled(cls) -> LossFunctions:
        """Through torch.compile, for fixed sizes."""
        return cls(torch.compile(next_token_loss, dynamic=False), torch.compile(draft_loss, dynamic=False))


@dataclass
class BatchLosses:
    """Losses of one batch: the main model's per token [N], and each draft's mean loss and agreement rate."""

    next_token: Tensor
    normaliser_squared: Tensor
    drafts: list[Tensor]
    agreement: list[Tensor]

    def draft_total(self) -> Tensor:
        """The drafts' losses, weighted."""
        return torch.stack([w * d for w, d in zip(DRAFT_WEIGHTS, self.drafts, strict=True)]).sum()

    def total(self) -> Tensor:
        """What is minimised on text."""
        return self.next_token.mean() + Z_LOSS * self.normaliser_squared.mean() + self.draft_total()


def batch_losses(
    model: TrainingModel, functions: LossFunctions, ids: Tensor, tokens: Tokens, window_start: int
) -> BatchLosses:
    """ids: [sequences, length + 1]. Second and third drafts are learnt on a quarter of each sequence."""
    sequences, length = ids.shape[0], ids.shape[1] - 1
    inputs, targets, head = ids[:, :-1].flatten(), ids[:, 1:].flatten(), model.lm_head.weight
    hidden = model.hidden(inputs, tokens)
    main, squared = functions.next_token(hidden, head, targets)
    drafts = model.mtp_drafts(inputs, hidden, tokens, window_start, length // 4)
    by_sequence = hidden.view(sequences, length, -1)
    last = tokens.position == tokens.position[-1]
    result = BatchLosses(main, squared, [], [])
    for number, student in enumerate(drafts.hidden):
        if number == 0:
            teacher, valid = torch.roll(hidden, -1, 0), ~last
        else:
            first, width = drafts.start + 1, drafts.width
            teacher = by_sequence[:, first : first + width].flatten(0, 1)
            valid = torch.arange(width, device=ids.device).repeat(sequences) >= number - 1
        loss, agree = functions.draft(student, teacher, head)
        result.drafts.append((loss * valid).sum() / valid.sum())
        result.agreement.append((agree & valid).sum() / valid.sum())
    return result
