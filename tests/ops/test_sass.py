"""Whether products are found whose operands are not where the program has put them."""

import pytest

from .sass import products_astray

RIGHT = """
        /*0000*/                   ULDC.64 UR10, c[0x0][0x210] ;
        /*0010*/                   UMOV UR47, 0x400 ;
        /*0020*/                   ULEA UR12, UP0, UR10, UR12, 0x1 ;
        /*0030*/                   USHF.R.U32.HI UR30, URZ, 0x4, UR47 ;
        /*0034*/                   UMOV UR8, URZ ;
        /*0038*/                   UMOV UR9, 0x40000040 ;
.L_x_0:
        /*0040*/                   UIADD3 UR10, UP0, UR30, 0x40, URZ ;
        /*0050*/                   UIADD3.X UR11, URZ, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0060*/                   UMOV UR8, UR30 ;
        /*0070*/                   HGMMA.64x32x16.F32.BF16 R56, gdesc[UR8].tnspA.tnspB, R56 ;
        /*0080*/               @P0 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
"""
WRONG = {
    "what was there before": ("UP0, UR30, 0x40", "UP0, UR10, 0x40"),
    "where nothing was written": ("UP0, UR30, 0x40", "UP0, UR22, 0x40"),
    "half of it where nothing was written": ("UR11, URZ", "UR11, UR23"),
    "only in the second round": ("HGMMA.64x32x16.F32.BF16 R56,", "UIADD3 UR30, UR12, 0x40, URZ ;\n"
        "        /*0078*/                   HGMMA.64x32x16.F32.BF16 R56,"),
    "only on one branch": ("UMOV UR8, UR30", "@P1 UMOV UR8, UR12"),
    "by way of a register": ("UMOV UR8, UR30", "R2UR UR8, R3 ;\n"
        "        /*0068*/                   UMOV UR9, URZ"),
}  # fmt: skip


def test_operands_in_shared_memory():
    assert products_astray(RIGHT) == 0


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_operands_elsewhere(change):
    code = RIGHT.replace(*change).replace("UMOV UR47", "MOV R3, c[0x0][0x218] ;\n"
        "        /*0018*/                   UMOV UR47")  # fmt: skip
    assert products_astray(code) == 1


def test_rows_in_registers_need_no_descriptor():
    code = RIGHT.replace("UMOV UR8, UR30", "UMOV UR8, UR12").replace(
        "R56, gdesc", "R56, R24, gdesc"
    )
    assert products_astray(code) == 0


def test_what_descriptors_of_tensors_load_is_no_operand():
    loads = [
        "UTMALDG.3D [UR8], [UR12], desc[UR14]",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR47], R3",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x10], R3",
    ]
    lines = "".join(f"        /*0064*/                   {load} ;\n" for load in loads)
    line = "        /*0070*/"
    assert products_astray(RIGHT.replace(line, lines + line)) == 0
