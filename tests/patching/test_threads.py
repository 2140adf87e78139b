"""A patched model gives the same from many threads as from one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from primal_attention import patch

from .families import FAMILIES, ids, real_tokens

THREADS, CALLS = 8, 40


def in_threads(jobs):
    """What each job gives, of so many calls in as many threads at once."""

    def run(job):
        return [job() for _ in range(CALLS)]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, jobs))


@pytest.mark.parametrize("layers", [-1, "all"])
@pytest.mark.parametrize("attention", ["primal", "softmax", "linear"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_passes_of_other_lengths_and_positions(name, attention, layers):
    model = patch(FAMILIES[name].model(), attention, layers)
    jobs, wants = [], []
    for i in range(THREADS):
        tokens = torch.randint(3, 31, (1, 20 + i))
        positions = torch.arange(20 + i)[None] + i

        @torch.no_grad()
        def job(tokens=tokens, positions=positions):
            return model(tokens, position_ids=positions)[0]

        jobs.append(job)
        wants.append(job())
    for want, results in zip(wants, in_threads(jobs), strict=True):
        for got in results:
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_gradients():
    model = patch(FAMILIES["llama"].model(), layers="all")
    weight = model.get_input_embeddings().weight
    jobs, wants = [], []
    for i in range(THREADS):
        tokens = torch.randint(3, 31, (1, 5 + i))

        def job(tokens=tokens, i=i):
            positions = torch.arange(5 + i)[None] + i
            logits = model(tokens, position_ids=positions, use_cache=False).logits
            return torch.autograd.grad(logits.square().sum(), weight)[0]

        jobs.append(job)
        wants.append(job())
    for want, results in zip(wants, in_threads(jobs), strict=True):
        for got in results:
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


def test_texts():
    model = patch(FAMILIES["llama"].model(), "linear", "all")
    jobs, wants = [], []
    for left in (False, True):
        tokens, mask = ids(), real_tokens(left=left).long()

        def job(tokens=tokens, mask=mask):
            options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2}
            return model.generate(tokens, attention_mask=mask, **options)

        jobs.append(job)
        wants.append(job())
    for want, results in zip(wants, in_threads(jobs), strict=True):
        assert all(torch.equal(got, want) for got in results)
