"""Small models of distinct sizes, and sequences with padding for them."""

import torch

from primal_attention.models import Embedding, Encoder, SequenceClassifier, Tower, build_attentions

B, N, CHANNELS, K = 3, 11, 7, 5  # batch, longest sequence, channels, outputs
H, D, FFN = 2, 10, 13
V = 17  # symbols
MASK = torch.tensor(
    [
        [True] * N,
        [True] * 6 + [False] * 5,
        [False, True, True, False, True, False, False, True, True, False, False],
    ]
)


def encoder(model="primalformer", num_layers=2, *, norm="pre", dropout=0.0, **options):
    attentions = build_attentions(model, num_layers, D, H, max_tokens=N + 1, **options)
    return Encoder(attentions, D, FFN, norm=norm, dropout=dropout)


def embedding(*, of_symbols=False):
    return Embedding(D, N, **({"vocab_size": V} if of_symbols else {"num_channels": CHANNELS}))


def tower(model="primalformer", *, of_symbols=False, pooling="mean", dropout=0.0, **options):
    stack = encoder(model, dropout=dropout, **options)
    tokens = embedding(of_symbols=of_symbols)
    return Tower(tokens, stack, pooling=pooling, num_tokens=N, dropout=dropout)


def classifier(
    model="primalformer",
    *,
    of_symbols=False,
    pooling="mean",
    dropout=0.0,
    mask_attention=True,
    **options,
):
    return SequenceClassifier(
        embedding(of_symbols=of_symbols),
        encoder(model, dropout=dropout, **options),
        K,
        pooling=pooling,
        num_tokens=N,
        dropout=dropout,
        mask_attention=mask_attention,
    )


def vectors(length=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, CHANNELS, generator=generator, dtype=torch.float64)


def symbols(length=N, seed=0):
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(seed))


def gradients(model, loss):
    """The gradient of every parameter that the loss depends on, by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def randomise(model, seed=0):
    """Every parameter drawn, so that none stays 0 or 1 where it started."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.3
            )
    return model
