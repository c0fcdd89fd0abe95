"""How results show themselves: rich's tables in terminals and notebooks, one line where Python prints them."""
import mxnet as mx
import pytest
from mxnet.gluon import nn

import gluon_amp as amp

DATA = mx.nd.ones((2, 4))


@pytest.fixture
def net():
    net = nn.HybridSequential(prefix="net[x]_")
    with net.name_scope():
        for name in ("plain_", "conv[0]_", "[/red]_", "[bold]_"):
            net.add(nn.Dense(4, in_units=4, prefix=name))
    net.initialize()
    net.hybridize()
    amp.init("float16")
    return net


@pytest.mark.parametrize("tool", [amp.report, amp.compare])
@pytest.mark.parametrize("columns", [20, 60, 200])
def test_names_with_brackets_are_whole_and_no_line_is_wider_than_the_terminal(tool, columns, net, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    found = tool(net, DATA)
    found.print()
    printed = capsys.readouterr().out
    assert columns == 20 or max(map(len, printed.splitlines())) <= columns
    assert all(f"net[x]_{name}_fwd" in printed for name in ("plain", "conv[0]", "[/red]", "[bold]"))
    found.print(wide=True)
    assert "net[x]_[/red]_fwd" in capsys.readouterr().out


@pytest.mark.parametrize("tool", [amp.report, amp.compare])
def test_a_line_in_python_and_a_table_in_a_notebook(tool, net):
    found = tool(net, DATA)
    assert "\n" not in repr(found)
    assert repr(found).startswith(f"<{type(found).__name__}: 4 of 4 operators in float16")
    shown = found._repr_mimebundle_()
    assert "float16" in shown["text/html"]
    assert "<pre" in shown["text/html"]


def test_the_summary_stands_around_the_table(net, capsys):
    net.hybridize(False)
    found = amp.report(net, DATA)
    found.print(by="op")
    printed = " ".join(capsys.readouterr().out.split())
    first, *others = found.summary.splitlines()
    assert 1 <= len(others) <= 5
    assert printed.startswith(first)
    assert printed.endswith(" ".join(others))
