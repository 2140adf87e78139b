"""Raw sound: wav files, sets, tasks and the filterbank that reads samples."""

import math

import numpy as np
import pytest
import torch

from primal_attention.models import Embedding
from primal_attention.tasks.audio import SOUND_AUGMENTATIONS, SOUNDS, audio_task
from primal_attention.tasks.wav_files import read_wav, wav_length, wav_rate
from primal_attention.training import build_model, find_recipe, launch, task_of, train

from .toy_sounds import RATE, digits_folder, esc50_folder, own_folder, tone, write_wav


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_pcm_of_all_widths_is_read(tmp_path, width, channels):
    x = np.random.default_rng(0).uniform(-1, 1, (101, channels))
    path = tmp_path / "x.wav"
    write_wav(path, x, width=width, rate=RATE)
    found = read_wav(path)
    assert found.dtype == np.float32
    assert (wav_length(path), wav_rate(path)) == (101, RATE)
    np.testing.assert_allclose(found, x, atol=2.0 ** (2 - 8 * width) + 1e-7)
    np.testing.assert_array_equal(read_wav(path, 7, 20), found[7:20])


def test_another_rate_keeps_a_tone_and_drops_what_is_too_high(tmp_path):
    stereo = np.stack([tone(500, rate=44100), 0.8 * tone(9000, rate=44100)], 1)
    for part in ("train", "test"):
        write_wav(tmp_path / "x" / part / "a" / "0.wav", stereo, rate=44100)
    found = SOUNDS.load("x", tmp_path)
    assert found.lengths.tolist() == [1600, 1600]
    y = found.codes[:1600] / 127.5 - 1
    samples = np.sign(y) * (256 ** np.abs(y) - 1) / 255
    np.testing.assert_allclose(samples[100:-100], 0.5 * tone(500)[100:-100], atol=0.02)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-7],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: content.replace(b"WAVE", b"AVI "),
        lambda content: content[:20] + b"\x03" + content[21:],  # floats
        lambda content: content[:24] + bytes(4) + content[28:],  # no rate
        lambda content: content[:40] + b"\xff\xff\xff\x7f" + content[44:],
    ],
)
def test_a_damaged_file_is_one_error_that_names_it(tmp_path, damage):
    path = tmp_path / "x.wav"
    write_wav(path, tone(500))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"x\.wav is not a whole WAV file \(.*\); get it anew"):
        read_wav(path)


@pytest.mark.parametrize(
    ("name", "make", "sizes"),
    [
        ("tones", own_folder, (8, 8)),
        ("tones-train", own_folder, (8, 8)),
        ("digits", digits_folder, (16, 16)),
        ("digits-bo", digits_folder, (16, 16)),
        ("esc50-fold5", esc50_folder, (32, 8)),
    ],
)
def test_folders_make_tasks_with_their_groups_held_out(tmp_path, name, make, sizes):
    make(tmp_path)
    task = audio_task(name, folder=tmp_path, num_samples=1000, valid=0.25, seed=0)
    assert (len(task.train) + len(task.valid), len(task.test)) == sizes
    batch = task.test[torch.arange(3)]
    x, mask = batch.inputs["x"], batch.inputs["token_mask"]
    assert x.shape[1] <= 1000 and (x[~mask] == 0).all()
    power = x.square().sum((1, 2)) / mask.sum(1)
    torch.testing.assert_close(power, torch.ones(3), rtol=1e-3, atol=1e-3)


def test_a_prepared_set_is_the_set(tmp_path):
    digits_folder(tmp_path)
    path = SOUNDS.prepare("digits", tmp_path, tmp_path / "out")
    whole, again = SOUNDS.load("digits", tmp_path), SOUNDS.load("digits", path.parent)
    assert again.classes == whole.classes
    for name in ("codes", "lengths", "labels", "groups", "is_test"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))


def test_compact_copies_are_read(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(20, 30)).astype(np.uint8)
    y, fold = (np.arange(20) % 2).astype(np.uint8), (np.arange(20) % 5 + 1).astype(np.uint8)
    np.savez(tmp_path / "esc50_8k.npz", x=x, y=y, fold=fold, classes=np.array(["a", "b"]))
    index = (np.arange(20) % 10).astype(np.uint8)
    arrays = {"length": np.full(20, 30, np.int32), "speaker": y, "speakers": np.array(["p", "q"])}
    np.savez(tmp_path / "fsdd_8k.npz", x=x.reshape(-1), y=y, index=index, **arrays)
    for name, tests in (("esc50-fold2", 4), ("digits", 10), ("digits-q", 10)):
        task = audio_task(name, folder=tmp_path, num_samples=25, valid=0.2, seed=0)
        assert len(task.test) == tests
        assert task.sizes.num_tokens == 25


def test_errors_say_what_to_do(tmp_path):
    options = {"folder": tmp_path, "num_samples": 100, "valid": 0.2, "seed": 0}
    with pytest.raises(FileNotFoundError, match=r"birds: no sounds\. Put"):
        audio_task("birds", **options)
    esc50_folder(tmp_path)
    with pytest.raises(ValueError, match="esc50-fold1, esc50-fold2"):
        audio_task("esc50", **options)
    (tmp_path / "esc50" / "audio" / "new.wav").write_bytes(b"")
    with pytest.raises(ValueError, match=r"new\.wav is not a clip of ESC-50"):
        audio_task("esc50-fold1", **options)


def test_augmentation_changes_clips_and_keeps_silence(tmp_path):
    own_folder(tmp_path)
    task = task_of(find_recipe("audio/tones", "linear", "clean"), tmp_path)
    torch.manual_seed(0)
    batch = task.train.drawn(torch.arange(4))
    x, mask = batch.inputs["x"], batch.inputs["token_mask"]
    assert x.shape == (4, task.sizes.num_tokens, 1)
    assert (x[~mask] == 0).all() and x.isfinite().all() and mask.any(1).all()
    torch.testing.assert_close(batch.target.sum(1), torch.ones(4))
    assert not torch.equal(x, task.train.drawn(torch.arange(4)).inputs["x"])


def test_speed_moves_the_pitch_by_its_part():
    augment = SOUND_AUGMENTATIONS["sound"]
    still = type(augment)(speed=0.0, tilt=0.0, time_mask=0.0, mixup=0.0)
    x = torch.from_numpy(tone(500, 0.5)).float()[None]
    same = still(x, torch.tensor([4000]), torch.ones(1, 1)).inputs["x"][0, :, 0]
    gain = (same @ x[0]) / (x[0] @ x[0])
    torch.testing.assert_close(same, gain * x[0], rtol=0, atol=1e-4)
    fast = type(augment)(speed=0.2, tilt=0.0, time_mask=0.0, mixup=0.0)
    torch.manual_seed(1)
    for _ in range(5):
        drawn = fast(x, torch.tensor([4000]), torch.ones(1, 1)).inputs["x"][0, :, 0]
        pitch = drawn.abs().new_tensor(np.fft.rfft(drawn.numpy()).__abs__().argmax() / 0.5)
        assert 390 <= pitch <= 610


def test_filters_answer_to_their_frequency():
    torch.manual_seed(0)
    embedding = Embedding(8, 800, num_channels=1, kernel_size=255, stride=40, num_filters=20)
    filters = embedding.tokens.filters
    mel = torch.linspace(0, 2595 * math.log10(1 + 4000 / 700), 22)[1:-1]
    for i in (4, 9, 15):
        pitch = 700 * (10 ** (float(mel[i]) / 2595) - 1)
        x = torch.from_numpy(tone(pitch, 0.1)).float()
        answers = torch.conv1d(x[None, None], filters)[0].square().mean(1).unflatten(0, (2, -1))
        assert answers.sum(0).argmax() == i
    assert embedding(torch.randn(2, 800, 1)).shape == (2, 20, 8)
    with pytest.raises(ValueError, match="num_filters=20 are of one channel, got num_channels=3"):
        Embedding(8, 800, num_channels=3, num_filters=20)


@pytest.mark.parametrize("model", ["primalformer_time", "primalformer", "linear", "softmax"])
def test_a_recipe_tells_tones_apart(tmp_path, model):
    own_folder(tmp_path)
    small = ("dim=16", "ffn_dim=32", "num_layers=1", "epochs=40", "batch_size=8", "dropout=0")
    recipe = find_recipe("audio/tones", model, "clean").with_settings(
        [*small, "kernel_size=63", "valid_fraction=0.25", "num_filters=12"]
    )
    task = task_of(recipe, tmp_path)
    outcome = train(recipe, task, launch("fp32", accelerator="cpu", devices=1))
    assert outcome.value == 100


def test_padding_changes_nothing(tmp_path):
    own_folder(tmp_path)
    recipe = find_recipe("audio/tones", "primalformer_time", "clean")
    task = task_of(recipe, tmp_path)
    model = build_model(recipe, task.sizes).eval()
    shortest = int(task.test.inputs["lengths"].argmin())
    alone = model(**task.test[torch.tensor([shortest])].inputs)
    together = model(**task.test[torch.arange(len(task.test))].inputs)[shortest : shortest + 1]
    torch.testing.assert_close(alone, together, rtol=1e-3, atol=1e-4)
