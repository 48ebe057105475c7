"""The page of LayerNorm and GELU."""

from tests.checks import python_blocks, run_blocks, section_of


def test_the_page_runs_as_it_stands(capsys):
    run_blocks(python_blocks(section_of("inside.md", "## LayerNorm and GELU")))
    assert capsys.readouterr().out == "torch.bfloat16 torch.float32 torch.bfloat16\n"
