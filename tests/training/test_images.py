"""Vision transformers on pictures: their recipes, what they learn, and how they are measured."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention.attention import PrimalAttention
from primal_attention.models.stacks import layer_names
from primal_attention.models.vision import PictureClassifier
from primal_attention.tasks import Sizes
from primal_attention.tasks.images import task
from primal_attention.training import (
    build_model,
    evaluation,
    find_recipe,
    launch,
    task_of,
    train,
    train_in,
)
from primal_attention.training.checkpoint import BEST, read_checkpoint
from primal_attention.training.optimizers import build_optimizer
from primal_attention.training.outcome import OutOfTimeError
from primal_attention.training.step import Step

from ..cli.command import primal, sets
from ..patching import torchvision_on_cpu  # noqa: F401 - before timm
from ..tasks.toy_pictures import SIDE, write_pictures
from .toy import one_process

timm = pytest.importorskip("timm", reason="needs timm: pip install 'primal-attention[images]'")

FABRIC = one_process()
FIVE = ["softmax", "primal_plus", "primalformer", "linear", "nystrom"]
SETTINGS = [
    *(f"image_size={SIDE}", "patch_size=7", "num_layers=3", "dim=24", "num_heads=3", "ffn_dim=46"),
    *("epochs=4", "batch_size=13", "lr=0.01", "precision=fp32", "valid_fraction=0.2"),
]
STATISTICS = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the pictures are, for whoever looks for data."""
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    return write_pictures(tmp_path / "images" / "toy", (31, 7)).parent


def small(model, *settings, protocol="clean"):
    options = ["attention.num_directions=5"] if model.startswith("primal") else []
    recipe = find_recipe("images/toy", model, protocol)
    return recipe.with_settings([*SETTINGS, *options, *settings])


def run(recipe, **options):
    return train(recipe, task_of(recipe), FABRIC, **options)


# Recipes


@pytest.mark.parametrize("name", ["imagenet-100", "imagenet-1k", "my-own-pictures"])
def test_the_recipe_is_that_of_the_published_runs(name):
    found = find_recipe(f"images/{name}", "primal_plus", "paper")
    expected = {
        **{"num_layers": 12, "dim": 384, "num_heads": 6, "ffn_dim": 1536},
        **{"image_size": 224, "patch_size": 16, "pooling": "class_token"},
        **{"batch_size": 1024, "lr": 1e-3, "epochs": 300, "schedule": "cosine"},
        **{"optimizer": "adamw", "weight_decay": 0.05, "clip_norm": None, "valid_fraction": None},
        **{"dropout": 0.0, "drop_path": 0.1, "augment": "deit"},
        **{"eta": 0.05, "objective": "released_batch"},
        "attention": {"num_directions": 96, "samples_per_direction": 10},
    }
    assert found.flat().items() >= expected.items()
    assert found.optim.warmup * found.optim.epochs == pytest.approx(5)
    assert find_recipe(f"images/{name}", "softmax", "paper").optim.eta == 0


def test_small_pictures_have_a_recipe_of_their_own():
    found = find_recipe("images/tiny-imagenet-100", "softmax", "clean")
    expected = {"image_size": 64, "patch_size": 8, "dim": 192, "num_heads": 3}
    assert found.flat().items() >= {**expected, "valid_fraction": 0.1}.items()
    assert found.optim.lr == pytest.approx(5e-4 * found.optim.batch_size / 512)
    paper = find_recipe("images/tiny-imagenet-100", "softmax", "paper")
    assert paper.replace(protocol="clean", valid_fraction=0.1) == found


@pytest.mark.parametrize(
    "setting", ["image_size=0", "patch_size=0", "drop_path=1", "drop_path=-0.1", "augment=diet"]
)
def test_settings_that_make_no_sense(setting):
    with pytest.raises(ValueError, match=setting.partition("=")[0]):
        small("softmax", setting)


def test_settings_that_do_not_fit(folder):
    sizes = Sizes(10, 3, 3, **STATISTICS)
    with pytest.raises(ValueError, match="image_size must be a multiple of patch_size=5, got 21"):
        build_model(small("softmax", "patch_size=5"), sizes)
    with pytest.raises(ValueError, match="pooling must be one of 'class_token', 'mean', got"):
        build_model(small("softmax", "pooling=flatten"), sizes)
    with pytest.raises(ValueError, match="no mean and std"):
        build_model(small("softmax"), Sizes(10, 3, 3))
    with pytest.raises(ValueError, match="valid_fraction of images/toy must be"):
        task_of(small("softmax", "valid_fraction=0"))


# Models


@pytest.mark.parametrize(("name", "dim"), [("tiny", 192), ("small", 384)])
def test_the_network_is_the_deit_of_timm(name, dim):
    theirs = timm.create_model(f"deit_{name}_patch16_224", num_classes=7)
    recipe = find_recipe("images/toy", "softmax", "paper").with_settings(
        [f"dim={dim}", f"num_heads={dim // 64}", f"ffn_dim={4 * dim}"]
    )
    ours = build_model(recipe, Sizes(197, 7, 3, **STATISTICS)).eval()
    assert isinstance(ours, PictureClassifier)
    ours.host.load_state_dict(theirs.state_dict())
    x = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in STATISTICS.values())
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs.eval()((x / 255 - mean) / std), atol=1e-5)
    rates = [each.drop_path1.drop_prob for each in ours.host.blocks[1:]]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(1, 12)])


@pytest.mark.parametrize("model", FIVE)
def test_layers_are_those_of_the_name(model):
    recipe = small(model, "num_layers=4")
    built = build_model(recipe, Sizes(10, 3, 3, **STATISTICS))
    kinds = [getattr(block.attn, "mechanism", None) for block in built.host.blocks]
    primal = [isinstance(kind, PrimalAttention) for kind in kinds]
    assert primal == [name == "primal" for name in layer_names(model, 4)]
    assert {kind.num_landmarks for kind in kinds if isinstance(kind, PrimalAttention)} <= {10}
    assert (kinds[-1] is None) == (model == "softmax")


@torch.no_grad()
@pytest.mark.parametrize("model", ["softmax", "primal_plus", "primalformer", "linear", "flow"])
@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_pictures_of_any_resolution(model, pooling):
    """More tokens than in training, and fewer; outside of training no path is dropped."""
    recipe = small(model, f"pooling={pooling}")
    built = build_model(recipe, Sizes(10, 3, 3, **STATISTICS)).eval()
    for width, height in ((SIDE, SIDE), (35, 35), (14, 14), (28, 14)):
        x = torch.randint(256, (5, 3, height, width), dtype=torch.uint8)
        found = built(x)
        assert found.shape == (5, 3) and found.isfinite().all()
        assert torch.allclose(built(x[2:3].float()), found[2:3], atol=1e-5)


def test_vectors_positions_and_lambda_do_not_decay():
    recipe = small("primal_plus", "eta=0.1")
    built = build_model(recipe, Sizes(10, 3, 3, **STATISTICS))
    decayed, spared = build_optimizer(recipe, built).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.05, 0.0)
    names = {id(each): name for name, each in built.named_parameters()}
    spared_names = {names[id(each)] for each in spared["params"]}
    assert {"host.pos_embed", "host.cls_token", "host.head.bias"} < spared_names
    assert any(name.endswith("raw_lambda") for name in spared_names)
    assert not any(name.endswith(("w_e", "w_r")) for name in spared_names)
    assert all(each.ndim > 1 for each in decayed["params"])
    total = sum(len(group["params"]) for group in (decayed, spared))
    assert total == len([each for each in built.parameters() if each.requires_grad])


# Runs


@pytest.mark.parametrize("model", FIVE)
def test_learns_stripes(folder, model):
    recipe = small(model, "augment=light", "epochs=6")
    outcome = run(recipe)
    assert outcome.metric == "accuracy"
    assert outcome.value > 60
    assert ("primal" in model) == (outcome.rounds[-1]["objective"] != 0)


@pytest.mark.parametrize("model", ["primalformer_time", "primal_time_plus"])
def test_models_with_a_learned_time_train(folder, model):
    outcome = run(small(model, "steps=2", "eval_every=2"))
    assert outcome.steps == 2
    assert 0 <= outcome.value <= 100


def test_what_is_reported_is_of_pictures_as_they_are(folder, monkeypatch):
    monkeypatch.setattr(evaluation, "_PIXELS", 3 * SIDE**2 * 4)
    sizes, forward = [], PictureClassifier.forward

    def noted(self, pictures):
        sizes.append((self.training, len(pictures), pictures.dtype))
        return forward(self, pictures)

    monkeypatch.setattr(PictureClassifier, "forward", noted)
    recipe = small("primal_plus", "epochs=1", "valid_fraction=none", protocol="paper")
    outcome, found = run(recipe), task_of(recipe)
    assert {size for training, size, _ in sizes if not training} <= {1, 4}
    assert {kind for training, _, kind in sizes if not training} == {torch.uint8}
    assert {kind for training, _, kind in sizes if training} == {torch.float32}  # augmented
    model = build_model(recipe, found.sizes).eval()
    model.load_state_dict(outcome.weights)
    with torch.no_grad():
        answers = model(found.test.inputs["pictures"]).argmax(-1)
    expected = (answers == found.test.target).double().mean().item()
    assert outcome.value == pytest.approx(100 * expected)
    assert outcome.valid == outcome.value  # the paper's protocol


@pytest.mark.parametrize("resident", [True, False])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    folder, tmp_path, monkeypatch, resident
):
    if not resident:
        monkeypatch.setattr(task, "RESIDENT", 0)
    recipe = small("primal_plus", "augment=deit", "epochs=3")
    whole = run(recipe)
    for _ in range(2):
        with pytest.raises(OutOfTimeError):
            train_in(tmp_path / "run", recipe, task_of(recipe), FABRIC, until=0)
    parts = train_in(tmp_path / "run", recipe, task_of(recipe), FABRIC)
    assert (whole.rounds, whole.value, whole.best) == (parts.rounds, parts.value, parts.best)
    assert all(torch.equal(whole.weights[name], parts.weights[name]) for name in whole.weights)


def test_a_checkpoint_answers_pictures(folder, tmp_path):
    recipe = small("primal_plus", "epochs=2", "augment=light", "refit=true")
    outcome = train_in(tmp_path / "run", recipe, task_of(recipe), FABRIC)
    best = read_checkpoint(tmp_path / "run" / BEST)
    assert best.facts["labels"] == ["birds", "cats", "dogs"]
    model = build_model(recipe, Sizes(**best.facts["sizes"])).eval()
    model.load_state_dict(best.tensors)
    found = task_of(recipe)
    assert Sizes(**best.facts["sizes"]) == found.sizes
    with torch.no_grad():
        answers = model(found.test.inputs["pictures"]).argmax(-1)
    right = (answers == found.test.target).double().mean().item()
    assert 100 * right == pytest.approx(outcome.value)


class Asking(TorchDispatchMode):
    """Notes what would make a program wait for its device."""

    waits = ("_local_scalar_dense", "nonzero", "equal.default", "unique", "masked_select")

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in self.waits) or "lift_fresh" in str(function):
            self.asked.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("model", ["softmax", "primal_plus", "primalformer"])
def test_a_step_asks_nothing_of_the_device(folder, model):
    recipe = small(model)
    found = task_of(recipe)
    network = build_model(recipe, found.sizes)
    network(found.train[torch.arange(2)].inputs["pictures"])
    indices = torch.arange(13)
    with Asking() as mode:
        batch = found.train.drawn(indices)
        found.goal.losses(network(**batch.inputs), batch.target).mean().backward()
    assert mode.asked == []
    with Asking() as mode:
        bool(torch.ones(()) > 0)
        torch.tensor([1.0])
    assert len(mode.asked) == 2


def test_a_step_that_decodes_is_not_recorded(folder, monkeypatch):
    monkeypatch.setattr("primal_attention.training.step.can_replay", lambda *_: True)
    monkeypatch.setattr("primal_attention.training.step.Replayed", lambda update: "recorded")
    recipe = small("softmax")
    steps = []
    for most in (2**33, 0):
        monkeypatch.setattr(task, "RESIDENT", most)
        steps.append(Step(recipe, task_of(recipe), FABRIC, torch.nn.Linear(1, 1), None))
    assert [step.update == "recorded" for step in steps] == [True, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["softmax", "primal_plus", "primalformer"])
def test_a_replayed_run_is_the_run(folder, model):
    outcomes = []
    for graph in ("true", "false"):
        recipe = small(model, f"graph={graph}", "epochs=3")
        fabric = launch("fp32", accelerator="cuda", devices=1)
        outcomes.append(train(recipe, task_of(recipe), fabric))
    replayed, plain = (outcome.rounds[-1]["train_loss"] for outcome in outcomes)
    assert replayed == pytest.approx(plain, rel=1e-2)


# The command line


def test_from_a_folder_to_a_number(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert "images/tiny-imagenet-100" in primal("data").stdout
    options = ["--model", "primal_plus", "--quiet", "--accelerator", "cpu", *sets(*SETTINGS)]
    options += sets("augment=light", "epochs=1", "attention.num_directions=5")
    result = primal("train", "images/toy", *options)
    assert result.exit_code == 0, result.output
    (directory,) = Path("runs/images/toy/primal_plus/clean").iterdir()
    measured = primal("evaluate", directory, "--split", "train", "--accelerator", "cpu")
    assert measured.exit_code == 0, measured.output
    assert "train accuracy" in measured.stdout and "74 cases" in measured.stdout
    missing = primal("train", "images/imagenet-100", "--model", "softmax")
    assert missing.exit_code == 2
    assert "imagenet-100: no pictures. Put them into" in " ".join(missing.output.split())


@pytest.mark.parametrize(("package", "what"), [("timm", "timm"), ("PIL", "Pillow")])
def test_what_is_not_installed_is_named(folder, monkeypatch, package, what):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.models.vision_transformer", None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"needs? {what}: pip install 'primal-attention\[images\]'"
    ):
        build_model(small("softmax"), task_of(small("softmax")).sizes)


def test_a_compiled_model_trains_to_the_same(folder, compiled):
    recipe = small("primal_plus", "drop_path=0", "augment=none", "epochs=1", "valid_fraction=0.5")
    plain, same = run(recipe), run(recipe.with_settings(["compile=true"]))
    assert set(compiled) == {True}
    for entry, other in zip(plain.rounds, same.rounds, strict=True):
        assert entry == pytest.approx(other, rel=1e-4)
