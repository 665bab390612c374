"""Rows that are quantised each by itself: as by `quantize`, with and without compiled kernels."""

import itertools

import numpy as np
import pytest

from quant import RowFormat, grouped, kernels, parse, quantize

SPECS = {
    "int8": grouped(8, 128, "fp32"),
    "unsigned": grouped(8, 128, "fp32").replace(signed=False),
    "fp8": grouped(8, 128, "fp32", code="e4m3"),
}


def encoded(rows, x):
    wire = np.full((len(x), rows.nbytes), 255, np.uint8)
    rows.encode(x, wire)
    return wire


@pytest.mark.parametrize("forms", [(), ("compiled",)])
@pytest.mark.parametrize("count, width", [(0, 5), (1, 1), (3, 128), (7, 130), (20, 1024)])
@pytest.mark.parametrize("code", SPECS)
def test_rows_are_those_of_quantize(code, count, width, forms):
    x = np.random.default_rng(0).standard_normal((count, width), dtype=np.float32)
    rows = RowFormat(SPECS[code], width)
    with kernels.forms(*forms):
        wire = encoded(rows, x)
        found = rows.decode(wire, np.full_like(x, np.nan))
        expected = quantize(x, SPECS[code])
    assert rows.nbytes == 4 * -(-width // 128) + 4 * -(-width // 4)
    np.testing.assert_array_equal(found, expected.dequantize())
    np.testing.assert_array_equal(rows.scales(wire), expected.scales())
    np.testing.assert_array_equal(rows.codes(wire).reshape(-1), expected.part("codes"))
    assert not wire[:, rows.start + width :].any()


@pytest.mark.parametrize("code", SPECS)
def test_a_row_does_not_depend_on_others(code):
    """Rows in another order, some of them twice, are the encoded rows in that order."""
    x, places = np.random.default_rng(1).standard_normal((9, 300), dtype=np.float32), [8, 0, 3, 3, 7]
    rows = RowFormat(SPECS[code], 300)
    np.testing.assert_array_equal(encoded(rows, x)[places], encoded(rows, x[places]))


@pytest.mark.parametrize("code", SPECS)
def test_groups_with_a_number_that_is_not_finite_become_nan(code):
    x = np.ones((2, 256), np.float32)
    x[0, 5], x[1, 255] = np.inf, np.nan
    rows = RowFormat(SPECS[code], 256)
    found = rows.decode(encoded(rows, x), np.empty_like(x))
    assert np.isnan(found[0, :128]).all() and np.isnan(found[1, 128:]).all()
    np.testing.assert_allclose([found[0, 128:], found[1, :128]], 1, rtol=1e-6)


@pytest.mark.parametrize("forms", [(), ("compiled",)])
@pytest.mark.parametrize("count, width", [(0, 5), (1, 1), (3, 128), (7, 130), (20, 1024)])
@pytest.mark.parametrize("code", SPECS)
def test_rows_are_added_and_multiplied_as_if_decoded_before(code, count, width, forms):
    random = np.random.default_rng(2)
    x, y = (random.standard_normal((some, width), dtype=np.float32) for some in (count, count + 5))
    places, weights = random.permutation(count + 5)[:count], random.random((count, 1), dtype=np.float32)
    if count:
        x[0, 0] = np.finfo(np.float32).max  # its group's largest code times its scale may be infinity
    rows = RowFormat(SPECS[code], width)
    wire, matrices = encoded(rows, x if SPECS[code].signed else abs(x)), (y, y.astype(np.float64))
    decoded = rows.decode(wire, np.empty_like(x))
    with kernels.forms(*forms):
        for y, of_rows in itertools.product(matrices, (None, weights)):
            found, expected = y.copy(), y.copy()
            rows.add(wire, found, places, of_rows)
            expected[places] += decoded if of_rows is None else of_rows * decoded
            np.testing.assert_array_equal(found, expected)
        decoded[:1, :128], rows.scales(wire)[:1, :1] = 0, 0  # sums of other numbers
        for y in matrices:
            products = rows.products(wire, y, places)
            assert products.dtype == y.dtype
            np.testing.assert_allclose(products, (y[places] * decoded).sum(axis=1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("forms", [(), ("compiled",)])
@pytest.mark.parametrize("code", SPECS)
def test_groups_that_became_nan_stay_nan(code, forms):
    x, rows = np.ones((2, 256), np.float32), RowFormat(SPECS[code], 256)
    x[0, 5] = np.inf
    wire, places = encoded(rows, x), np.array([1, 0])
    with kernels.forms(*forms):
        rows.add(wire, y := np.zeros_like(x), places)
        products = rows.products(wire, x, places)
    assert np.isnan(y[1, :128]).all() and np.isfinite(y[0]).all() and np.isfinite(y[1, 128:]).all()
    assert np.isnan(products[0])


@pytest.mark.parametrize("spec", ["int4", "int8"])
def test_other_specs_are_refused(spec):
    spec = grouped(4, 128, "fp32") if spec == "int4" else parse("int8")
    with pytest.raises(ValueError, match="spec: expected symmetric codes of 8 bits with float32 scales of groups"):
        RowFormat(spec, 10)


@pytest.mark.parametrize("rows, width, dtype", [(3, 300, "f4"), (2, 299, "f4"), (2, 300, "f8")])
def test_arrays_that_do_not_fit(rows, width, dtype):
    """They are refused before anything is read or written."""
    form, x = RowFormat(grouped(8, 128, "fp32"), 300), np.zeros((rows, width), dtype)
    wire = np.full((2, form.nbytes), 7, np.uint8)
    for call in (form.encode, lambda x, wire: form.decode(wire, x)):
        with pytest.raises(ValueError, match=r"expected float32 \(n, 300\) and uint8"):
            call(x, wire)
    assert (wire == 7).all()


@pytest.mark.parametrize("forms", [(), ("compiled",)])
@pytest.mark.parametrize("place", [3, -4])
def test_places_out_of_range(forms, place):
    """Compiled loops check no indices: such calls are left to NumPy, which refuses them."""
    rows, y = RowFormat(grouped(8, 128, "fp32"), 130), np.zeros((3, 130), np.float32)
    wire, places = encoded(rows, np.ones((2, 130), np.float32)), np.array([0, place])
    with kernels.forms(*forms):
        for call in (rows.add, rows.products):
            with pytest.raises(IndexError):
                call(wire, y, places)
    assert not y.any()


def test_arrays_that_would_be_copied():
    """Rows with gaps are refused, into which nothing would be written, and so is what cannot be written."""
    x = np.ones((4, 130), np.float32)
    rows = RowFormat(SPECS["int8"], 130)
    wire = encoded(rows, x)
    gaps, kept = np.zeros((8, 130), np.float32)[::2], np.zeros_like(x)
    kept.flags.writeable = False
    for wrong in (gaps, kept, np.zeros((130, 4), np.float32).T):
        with pytest.raises(ValueError, match="expected C-contiguous rows, and the destination writable"):
            rows.decode(wire, wrong)
    wire.flags.writeable = False
    with pytest.raises(ValueError, match="and the destination writable"):
        rows.encode(x, wire)
    np.testing.assert_array_equal(rows.decode(wire, np.zeros_like(x)), x)
