"""Reading what Inductor generates, and the page about it. Generating needs triton, and is no test."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import compiled_kernels
from benchmarks.compiled_kernels import Case, Code, page, read, table

SIZES = {"s70": 1024, "s75": 4096}
SOURCE = """
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
aten = torch.ops.aten

triton_red_fused_sum_0 = async_compile.triton('triton_red_fused_sum_0', '''
def triton_red_fused_sum_0(in_ptr0, out_ptr0, xnumel, r0_numel):
    triton_helpers.run(tl.load(in_ptr0))
''', device_str='cuda')

class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        s75 = arg0_1
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((s75, (s70 // 256), (s70 // 512)), ((s70 // 256), 1, 1), torch.float32)
            triton_red_fused_sum_0.run(arg2_1, buf0, 32*s70, stream=raw_stream0)
            buf1 = empty_strided_cuda((), (), torch.float32)
            triton_red_fused_sum_0.run(buf0, buf1, 1, stream=raw_stream0)
            buf2 = buf0; del buf0  # reuse
            buf3 = empty_strided_cuda((s75, s70), (s70, 1), torch.int8)
            triton_poi_fused_add_1.run(arg1_1, buf3, s70*s75, stream=raw_stream0)
        return ()
"""


def case(text: str = "adamw-8:4096x1024") -> Case:
    return Case.parse(text)


def test_launches_and_allocations_are_read():
    allocations = (("float32", 4096 * 4 * 2), ("float32", 1), ("int8", 4096 * 1024))
    assert read(SOURCE, SIZES) == Code(3, allocations)


@pytest.mark.parametrize(
    "call", ["extern_kernels.mm(arg0_1, arg1_1, out=buf0)", "torch.ops.aten.sort.stable(buf0)", "cpp_fused_add_0(buf0)"]
)
def test_what_cannot_be_counted_is_refused(call):
    with pytest.raises(NotImplementedError, match=call.partition("(")[0]):
        read(call, {})


def test_the_table_counts_temporaries_as_large_as_the_parameter():
    numel = 4096 * 1024
    several = Code(3, (("float32", numel), ("float32", 2 * numel), ("int8", numel // 2), ("int8", numel // 4)))
    text = table({case(): Code(1, (("float32", 1024),)), case("adafactor-32:4096x1024:bfloat16"): several})
    assert text.splitlines()[2:] == [
        "| adamw-8 | 4096x1024 | float32 | 1 | none |",
        "| adafactor-32 | 4096x1024 | bfloat16 | 3 | 2 float32, 1 int8 |",
    ]


def test_the_page_says_how_it_was_made():
    results = {case(): Code(1, ())}
    text = page(results, "a command")
    for expected in (table(results), "Made by `a command`", f"torch {torch.__version__}", "nothing ran on a GPU"):
        assert expected in text


def test_cases_are_read():
    assert case("adamw[m=int8,v=factored]:8x4x2:bfloat16") == Case(
        "adamw[m=int8,v=factored]", (8, 4, 2), torch.bfloat16
    )
    assert all(case(text).dtype.is_floating_point for text in compiled_kernels.DEFAULT)


@pytest.mark.parametrize("text", ["adamw-8", "adamw-8:4096x", "adamw-8:8x8:compile", "adamw-8:8x8:int8", "adamw-9:8x8"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        case(text)


def test_without_triton_there_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit):
        compiled_kernels.main([])
    assert capsys.readouterr().err.splitlines()[-1].endswith("this needs triton: pip install --group bench (on Linux).")
