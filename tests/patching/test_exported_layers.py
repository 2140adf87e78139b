"""Exported layers: the same outputs as the layers, for sizes that the export has not seen."""

from .exports import BOUNDED, TEXT, Layers, assert_exported, layer, primal, sequences

SIZES = [(2, 5), (5, 37), (1, 1), (3, 8)]  # batch, tokens


def test_masked_layers(tmp_path):
    layers = {weights: primal(weights) for weights in ("sampled", "static", "dual")}
    model = Layers(**layers, time=layer("primal_time", rotary=True))
    cases = [sequences(*size) for size in SIZES]
    dynamic = {"x": TEXT, "token_mask": TEXT}
    assert_exported(model, sequences(3, 11), cases, dynamic, tmp_path)


def test_layers_without_a_mask(tmp_path):
    model = Layers(sampled=primal("sampled"), softmax_sh=layer("softmax_sh"))
    cases = [sequences(*size, masked=False) for size in SIZES]
    assert_exported(model, sequences(3, 11, masked=False), cases, {"x": TEXT}, tmp_path)


def test_causal_layers(tmp_path):
    layers = {weights: primal(weights, causal=True) for weights in ("static", "dual")}
    layers["sums"] = layer("linear", causal=True, scales=None)
    model = Layers(**layers, time=layer("primal_time", causal=True, rotary=True))
    cases = [sequences(*size) for size in SIZES]
    dynamic = {"x": TEXT, "token_mask": TEXT}
    assert_exported(model, sequences(3, 11), cases, dynamic, tmp_path)


def test_mechanisms_of_other_kinds(tmp_path):
    names = ("softmax_bn_sh", "reformer", "longformer", "soft")
    model = Layers(**{name: layer(name) for name in names})
    cases = [sequences(*size) for size in SIZES]
    dynamic = {"x": BOUNDED, "token_mask": BOUNDED}
    assert_exported(model, sequences(3, 11), cases, dynamic, tmp_path)
