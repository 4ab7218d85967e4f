"""Packing: exact round trips, small peaks, and one clear line for what does not fit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from w4a16_moe import MoeProblem, get_profile, pack, pack_experts, unpack
from w4a16_moe.layout import get_layout
from w4a16_moe.layout.checkpoint import CheckpointWeight, encode, pack_checkpoint

PORTABLE = get_profile("portable")
PROFILES = ["portable", "h200_decode_ep8"]


def weights(E: int, N: int, K: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (E, N, K), dtype=torch.uint8, generator=generator)
    scales = (torch.rand((E, N, K // 32), generator=generator) * 0.02 + 0.002).to(torch.bfloat16)
    return codes, scales


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("E, N, K", [(2, 64, 64), (3, 128, 256), (1, 64 * 33, 1024), (2, 448, 1984)])
def test_round_trip_is_exact(profile, E, N, K):
    codes, scales = weights(E, N, K)
    packed = pack(codes, scales, MoeProblem(num_experts=E, N=N, K=K), get_profile(profile))
    back_codes, back_scales = unpack(packed)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales, scales)


@pytest.mark.parametrize("N, K", [(4, 64), (5, 32), (7, 96), (1, 224)])
def test_rows_layout_takes_any_n_and_odd_group_counts(N, K):
    codes, scales = weights(2, N, K)
    packed = pack(codes, scales, MoeProblem(num_experts=2, N=N, K=K), PORTABLE)
    back_codes, back_scales = unpack(packed)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales, scales)


def test_rows_layout_is_what_its_docstring_says():
    codes, scales = weights(1, 3, 128)
    packed = pack(codes, scales, MoeProblem(num_experts=1, N=3, K=128), PORTABLE)
    for block in range(2):
        for n in range(3):
            for t in range(4):
                for h in range(2):
                    for q in range(2):
                        for b in range(2):
                            byte = int(packed.codes[0, block, n, 8 * t + 4 * h + 2 * q + b])
                            k = 64 * block + 16 * h + 8 * q + 2 * t + b
                            assert byte & 15 == int(codes[0, n, k])
                            assert byte >> 4 == int(codes[0, n, k + 32])
            assert packed.scales[0, block, n].tolist() == scales[0, n, 2 * block : 2 * block + 2].tolist()


@pytest.mark.parametrize("profile", PROFILES)
def test_packed_tensors_have_the_announced_shapes_and_size(profile):
    problem = MoeProblem(num_experts=2, N=128, K=256)
    packed = pack(*weights(2, 128, 256), problem, get_profile(profile))
    shape, dtype, scale_shape, scale_dtype = get_layout(packed.profile.layout).tensor_specs(problem)
    assert (tuple(packed.codes.shape), packed.codes.dtype) == (tuple(shape), dtype)
    assert (tuple(packed.scales.shape), packed.scales.dtype) == (tuple(scale_shape), scale_dtype)
    assert packed.codes.nbytes + packed.scales.nbytes == problem.num_experts * problem.weight_bytes


def test_experts_may_come_one_by_one_or_in_pieces():
    codes, scales = weights(2, 192, 128)
    problem = MoeProblem(num_experts=2, N=192, K=128)
    whole = pack(codes, scales, problem, PORTABLE)
    uneven = lambda e: [(codes[e, :100], scales[e, :100]), (codes[e, 100:], scales[e, 100:])]  # noqa: E731
    for source in (zip(codes, scales, strict=True), lambda e: (codes[e], scales[e]), uneven):
        assert torch.equal(pack_experts(source, problem, PORTABLE).codes, whole.codes)


# ---- peak memory


@contextmanager
def live_bytes() -> Iterator[list[int]]:
    """[now, peak] bytes of tensor storage allocated inside, by following every operation's results."""
    count, known = [0, 0], set()

    def release(key: int, size: int) -> None:
        known.discard(key)
        count[0] -= size

    class Follow(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in tree_iter(result):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    key = storage._cdata
                    if key not in known and storage.nbytes():
                        known.add(key)
                        count[0] += storage.nbytes()
                        count[1] = max(count[1], count[0])
                        weakref.finalize(storage, release, key, storage.nbytes())
            return result

    with Follow():
        yield count


def test_the_peak_counter_sees_temporaries_come_and_go():
    with live_bytes() as count:
        for _ in range(3):
            a = torch.zeros(1000, dtype=torch.uint8)
            b = a + 1
            del a, b
        c = torch.zeros(500, dtype=torch.uint8)
    assert count[1] == 2000
    assert count[0] == c.nbytes


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("form", ["codes", "checkpoint"])
def test_packing_needs_under_a_tenth_of_the_packed_layer_beside_it(profile, form):
    """24 experts of 1024 x 7168 (99 MB packed): one expert at a time, read when asked for, as from disk."""
    problem = MoeProblem(num_experts=24, N=1024, K=7168)
    codes, scales = weights(1, 512, 7168)
    half = encode(codes[0], scales[0])
    with live_bytes() as count:
        if form == "codes":
            packed = pack_experts(
                lambda e: ((codes[0, :256], scales[0, :256]) for _ in range(4)), problem, get_profile(profile)
            )
        else:  # gate and up as two layers, each a fresh copy as a file reader would return it
            packed = pack_checkpoint(
                lambda e: [half._replace(weight_packed=half.weight_packed.clone()) for _ in range(2)],
                problem,
                get_profile(profile),
            )
    size = packed.codes.nbytes + packed.scales.nbytes
    assert size == problem.num_experts * problem.weight_bytes
    assert count[1] - size < 0.1 * size, f"peak {count[1] - size} beside {size}"


@pytest.mark.gpu
@pytest.mark.parametrize("profile", PROFILES)
def test_packing_a_real_layer_on_the_gpu_stays_under_a_tenth(profile):
    problem = MoeProblem(num_experts=48, N=4096, K=7168)
    codes, scales = (t[0].cuda() for t in weights(1, 4096, 7168))
    given = codes.nbytes + scales.nbytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = pack_experts(lambda e: (codes, scales), problem, get_profile(profile))
    extra = torch.cuda.max_memory_allocated() - before - packed.codes.nbytes - packed.scales.nbytes
    assert extra + given < 0.1 * (packed.codes.nbytes + packed.scales.nbytes)


# ---- refusals


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, s: (c.int(), s), r"codes must be uint8 \[2, 64, 64\], not int32"),
        (lambda c, s: (c[:, :32], s), r"codes must be uint8 \[2, 64, 64\], not uint8 \[2, 32, 64\]"),
        (lambda c, s: (c, s.float()), r"scales must be bfloat16 \[2, 64, 2\], not float32"),
        (lambda c, s: (c, s[..., :1]), r"scales must be bfloat16 \[2, 64, 2\]"),
        (lambda c, s: (c + 1, s), "codes of expert 0 go up to 16"),
        (lambda c, s: (c, s * float("nan")), "scales of expert 0 hold nan"),
        (lambda c, s: (c, torch.full_like(s, 2.0**15)), "scales of expert 0 hold 32768; legal are 0 and magnitudes"),
        (lambda c, s: (c, torch.full_like(s, 2.0**-106)), "legal are 0 and magnitudes from"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, message):
    codes, scales = change(*weights(2, 64, 64))
    with pytest.raises(ValueError, match=message) as caught:
        pack(codes, scales, MoeProblem(num_experts=2, N=64, K=64), PORTABLE)
    assert "\n" not in str(caught.value)


def test_too_few_or_too_many_experts_or_rows_are_refused():
    codes, scales = weights(3, 64, 64)
    problem = MoeProblem(num_experts=2, N=64, K=64)
    with pytest.raises(ValueError, match="more than num_experts=2"):
        pack_experts(zip(codes, scales, strict=True), problem, PORTABLE)
    with pytest.raises(ValueError, match="1 experts were given"):
        pack_experts([(codes[0], scales[0])], problem, PORTABLE)
    with pytest.raises(ValueError, match="expert 0 has 32 rows of codes; the problem has N=64"):
        pack_experts(lambda e: (codes[0, :32], scales[0, :32]), problem, PORTABLE)
    with pytest.raises(ValueError, match="expert 0 has at least 128 rows"):
        pack_experts(lambda e: [(codes[0], scales[0])] * 2, problem, PORTABLE)


def test_another_group_size_is_refused_by_every_layout():
    problem = MoeProblem(num_experts=1, N=64, K=128, group_size=64)
    codes, scales = torch.zeros((1, 64, 128), dtype=torch.uint8), torch.ones((1, 64, 2), dtype=torch.bfloat16)
    for profile in PROFILES:
        with pytest.raises(ValueError, match=f"profile {profile} .* cannot hold this problem: group_size=64"):
            pack(codes, scales, problem, get_profile(profile))


def test_weights_serve_only_the_profile_they_were_packed_for():
    packed = pack(*weights(1, 64, 64), MoeProblem(num_experts=1, N=64, K=64), PORTABLE)
    with pytest.raises(ValueError, match=r"packed for profile portable .* cannot serve profile h200_prefill_ep8"):
        packed.for_profile("h200_prefill_ep8")
    with pytest.raises(ValueError, match="packed for profile portable were given to profile h200_tp8"):
        packed.require("h200_tp8")
    assert isinstance(encode(*weights(1, 64, 64)), CheckpointWeight)
