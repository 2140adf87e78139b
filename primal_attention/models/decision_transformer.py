"""The Decision Transformer of Hugging Face transformers, with attention patched.

A step of an episode is three tokens: return-to-go, state, action. The action is read off the token
of the state, so it depends on the past, the return asked for and the state alone.

Letters: B episodes, K steps, S numbers of a state, A of an action, D model dim.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from primal_attention.extras import needing
from primal_attention.models.stacks import patch_host
from primal_attention.patching.hosts.host import PatchedAttention


class EpisodeMemory(NamedTuple):
    """The tokens and the action that a model remembers of an episode."""

    cache: Any  # of the tokens so far, up to the last state
    action: Tensor | None = None  # [B, A]: the last, which is not among them
    step: int = 0  # of the next state


class DecisionModel(nn.Module):
    """Actions from trajectories.

    Padding comes after all real steps, which are causal and so never see it.

    Args:
        host: A ``DecisionTransformerModel`` of transformers, patched or not.
    """

    def __init__(self, host: Any):
        super().__init__()
        self.host = host
        for unused in (host.predict_state, host.predict_return, host.encoder.wte):
            unused.requires_grad_(False)

    @property
    def action_dim(self) -> int:
        """Numbers A of an action."""
        return int(self.host.config.act_dim)

    def forward(
        self,
        states: Tensor,
        actions: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        token_mask: Tensor | None = None,
    ) -> Tensor:
        """Predict the action [B, K, A] at each step, from the steps before it.

        Args:
            states: Standardised, [B, K, S].
            actions: What was done, [B, K, A]; that of a step does not bear on its output.
            returns_to_go: Scaled, [B, K, 1].
            timesteps: The number of each step in its episode, int64 [B, K].
            token_mask: The real steps, [B, K]; padding is on the right.
        """
        if token_mask is not None:
            padding = ~token_mask[..., None]
            states, actions = states.masked_fill(padding, 0), actions.masked_fill(padding, 0)
            returns_to_go = returns_to_go.masked_fill(padding, 0)
        embedded = (
            self.host.embed_return(returns_to_go),
            self.host.embed_state(states),
            self.host.embed_action(actions),
        )
        time = self.host.embed_timestep(timesteps)
        tokens = torch.stack([each + time for each in embedded], dim=2)
        hidden = self._encode(rearrange(tokens, "b k three d -> b (k three) d"))
        found: Tensor = self.host.predict_action(hidden[:, 1::3])
        return found

    def begin(self) -> EpisodeMemory:
        """Start before the first state of episodes."""
        from transformers import DynamicCache

        return EpisodeMemory(DynamicCache())

    def act(
        self, states: Tensor, returns_to_go: Tensor, past: EpisodeMemory
    ) -> tuple[Tensor, EpisodeMemory]:
        """Return the action [B, A] in states [B, S], by all of the past, and the past after it.

        Patched layers remember a state of constant size, layers of softmax all keys and values.

        Args:
            states: Standardised.
            returns_to_go: Scaled, [B, 1].
            past: From ``begin``, or from the action before.
        """
        time = self.host.embed_timestep.weight[past.step]
        tokens = [self.host.embed_return(returns_to_go) + time]
        tokens.append(self.host.embed_state(states) + time)
        if past.action is not None:
            before = self.host.embed_timestep.weight[past.step - 1]
            tokens.insert(0, self.host.embed_action(past.action) + before)
        hidden = self._encode(torch.stack(tokens, dim=1), past.cache)
        action: Tensor = self.host.predict_action(hidden[:, -1])
        return action, EpisodeMemory(past.cache, action, past.step + 1)

    def _encode(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Encode embedded tokens [B, N, D] that follow those of the cache.

        The blocks are called one by one: the encoder would make a mask of the positions, which are
        all 0, as if each token were a sequence of its own, and would synchronise at each step.
        """
        encoder = self.host.encoder
        before, N = 0 if cache is None else cache.get_seq_length(), tokens.shape[1]
        mask = tokens.new_full((N, before + N), -torch.inf).triu(before + 1)[None, None]
        hidden: Tensor = encoder.drop(self.host.embed_ln(tokens) + encoder.wpe.weight[0])
        for block in encoder.h:
            patched = isinstance(block.attn, PatchedAttention)
            hidden = block(
                hidden,
                past_key_values=cache,
                attention_mask=None if patched else mask,
                use_cache=cache is not None,
            )
        normalised: Tensor = encoder.ln_f(hidden)
        return normalised


def keep_episodes(past: EpisodeMemory, kept: Tensor) -> EpisodeMemory:
    """Select the past of some of the episodes."""
    past.cache.batch_select_indices(kept)
    return past._replace(action=None if past.action is None else past.action[kept])


def build_decision(
    model: str,
    *,
    state_dim: int,
    action_dim: int,
    sizes: Mapping[str, int],
    dropout: float,
    max_steps: int,
    options: Mapping[str, Any],
) -> DecisionModel:
    """Build a Decision Transformer with the attentions of a model.

    Args:
        model: One of ``MODELS`` with a causal form.
        state_dim: Numbers S of a state.
        action_dim: Numbers A of an action.
        sizes: ``dim``, ``num_layers``, ``num_heads``, ``ffn_dim`` and ``num_tokens``.
        dropout: Everywhere.
        max_steps: The longest episode.
        options: Of the mechanism.
    """
    with needing("a Decision Transformer needs transformers", "patch"):
        from transformers import DecisionTransformerConfig, DecisionTransformerModel
    config = DecisionTransformerConfig(
        state_dim=state_dim,
        act_dim=action_dim,
        hidden_size=sizes["dim"],
        n_layer=sizes["num_layers"],
        n_head=sizes["num_heads"],
        n_inner=sizes["ffn_dim"],
        n_positions=sizes["num_tokens"],
        activation_function="relu",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        max_ep_len=max_steps,
        bos_token_id=None,
        eos_token_id=None,
    )
    host = DecisionTransformerModel(config)  # type: ignore[no-untyped-call]
    return DecisionModel(patch_host(host, model, options))
