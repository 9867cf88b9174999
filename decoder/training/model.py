"""The network being trained: the main model, its MTP layer, and the losses of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Kernels, Layer, Norm, Tokens, linear, rms_norm
from .shape import Shape


class MainModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, shape.is_full_attention(n)) for n in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size)


class MtpHead(nn.Module):
    """The multi-token prediction layer's weights, by their names in a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(shape, full_attention=True)])
        self.norm = Norm(shape.hidden_size)
        self.pre_fc_norm_embedding = Norm(shape.hidden_size)
        self.pre_fc_norm_hidden = Norm(shape.hidden_size)


class TrainingModel(nn.Module):
    """Main model, head and MTP layer; state_dict names are the checkpoint's."""

    def __init__(self, shape: Shape, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.kernels = kernels or Kernels()
        self.model = MainModel(shape)
        self.mtp = MtpHead(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():  # residual outputs start small
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv1d):
            nn.init.uniform_(module.weight, -0.5, 0.5)

    def hidden(self, ids: Tensor, tokens: Tokens) -> Tensor:
        """ids: [N] -> final hidden states [N, hidden], after the final norm."""
        x = self.model.embed_tokens(ids).float()
        for layer in self.model.layers:
            x = layer(x, tokens, self.kernels)
        return rms_norm(x, self.model.norm.weight, self.shape.rms_norm_eps).to(self.kernels.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]."""
        return linear(hidden, self.lm_head.weight, self.kernels.dtype)

    def mtp_input(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """fc(norm_e(embed(x_{p+1})) ‖ norm_h(h_p)) for flat positions p."""
        eps, mtp = self.shape.rms_norm_eps, self.mtp
        embedding = rms_norm(self.model.embed_tokens(next_ids), mtp.pre_fc_norm_embedding.weight, eps)
        state = rms_norm(hidden, mtp.pre_fc_norm_hidden.weight, eps)
        return linear(torch.cat((embedding, state), -1), mtp.fc.weight, self.kernels.dtype).float()

    def mtp_output(self, x: Tensor) -> Tensor:
        """The MTP layer's output after mtp.norm, which the head and the next recursion read."""
        return rms_norm(x, self.mtp.norm.weight, self.shape.rms_norm_eps).to(self.kernels.dtype)

    def mtp_drafts(self, ids: Tensor, hidden: Tensor, tokens: Tokens, start: int, width: int) -> Drafts:
        """Three recursive drafts: the first at every position, the other two at positions start … start + width - 1.

        As in decoding, draft j of a position reads true-state keys for what precedes its first draft, and its own
        chain's keys after that. 1 <= start and start + width < length.
        """
        layer, sequences = cast(Layer, self.mtp.layers[0]), tokens.sequences
        x = self.mtp_input(torch.roll(ids, -1), hidden)
        q, gate, k, v = layer.project(x, tokens, self.kernels)
        mixed = _attend(q, [k], [v], sequences, None)
        first = self.mtp_output(layer.finish_attention(x, mixed, gate, self.kernels))
        drafts = Drafts(start, width, [first])
        length = len(ids) // sequences
        window = Tokens.of(self.shape, sequences, width, ids.device, start)
        next_ids = ids.view(sequences, length)[:, start + 1 : start + width + 1].flatten()
        state = first.view(sequences, length, -1)[:, start - 1 : start - 1 + width].flatten(0, 1)
        keys, values = [k], [v]
        for draft in (2, 3):
            x = self.mtp_input(next_ids, state)
            q, gate, k, v = layer.project(x, window, self.kernels)
            keys, values = [*keys, k], [*values, v]
            mask = draft_mask(length, start, width, draft, ids.device)
            mixed = _attend(q, keys, values, sequences, mask)
            drafts.hidden.append(self.mtp_output(layer.finish_attention(x, mixed, gate, self.kernels)))
            # The first row of a window has no predecessor: the loss leaves it out.
            state = torch.roll(drafts.hidden[-1], 1, 0)
        return drafts


@dataclass
class Drafts:
    """MTP outputs: the first draft's [N, hidden], then those of the second and third, [sequences * width, hidden]."""

    start: int
    width: int
    hidden: list[Tensor] = field(default_factory=list)


def draft_mask(length: int, start: int, width: int, draft: int, device: torch.device) -> Tensor:
    """[width, length + (draft - 1) * width]: which keys draft 2 or 3 at each window position may read."""
    query = torch.arange(width, device=device)[:, None]
    own = torch.arange(width, device=device)[None, :]
    true_state = torch.arange(length, device=device)[None, :] <= query + start - (draft - 1)
    chain = [own == query - (draft - j) for j in range(2, draft + 1)]
    return torch.cat((true_state, *chain), 1)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], sequences: int, mask: Tensor | None) -> Tensor:
    """Attention of flat queries over the keys of each sequence, concatenated along time; causal without a mask."""
    repeat = q.shape[1] // keys[0].shape[1]

    def by_sequence(t: Tensor) -> Tensor:
        return t.view(sequences, -1, *t.shape[1:]).transpose(1, 2)

    k, v = (torch.cat([by_sequence(t) for t in ts], 2).repeat_interleave(repeat, 1) for ts in (keys, values))
    mixed = F.scaled_dot_product_attention(by_sequence(q), k, v, attn_mask=mask, is_causal=mask is None)
    return mixed.transpose(1, 2).flatten(0, 1)
