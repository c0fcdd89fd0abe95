"""What Jupyter shows of results: a table of at most 20 rows, and one line where Python prints them."""
import mxnet as mx
import pytest
from mxnet.gluon import nn

import gluon_amp as amp


@pytest.fixture
def net():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(25):
            net.add(nn.Dense(4, in_units=4))
    net.initialize()
    net.hybridize()
    amp.init("float16")
    return net


DATA = mx.nd.ones((2, 4))
MAKERS = {
    "report": lambda net: amp.report(net, DATA), "explain": lambda net: amp.explain(net, "net_dense0_fwd", DATA),
    "compare": lambda net: amp.compare(net, DATA), "preflight": lambda net: amp.preflight(net, DATA),
    "advise": lambda net: amp.advise(net, DATA)}


@pytest.mark.parametrize("name", MAKERS)
def test_a_line_and_a_table(name, net):
    found = MAKERS[name](net)
    line, html = repr(found), found._repr_html_()
    assert "\n" not in line
    assert line.startswith(f"<{type(found).__name__}: {str(found).splitlines()[0]}")
    assert html.count("<tr>") <= 21
    assert ("<table>" in html) is (name in ("report", "compare", "preflight"))


def test_the_report_counts_kinds_and_the_comparison_shows_the_worst(net):
    html = amp.report(net, DATA)._repr_html_()
    assert "<td>FullyConnected</td><td>25</td><td>25</td>" in html
    html = amp.compare(net, DATA)._repr_html_()
    assert html.count("<tr>") == 21
    assert "To see everything: its print(count=1000)" in html


def test_long_tables_are_cut_and_names_are_escaped():
    weights = {f"<w{number}>": mx.nd.array([7e4]) for number in range(30)}
    html = amp.preflight(weights, target_dtype="float16")._repr_html_()
    assert html.count("<tr>") == 21
    assert "and 10 more rows" in html
    assert "&lt;w0&gt;" in html
    assert "<w" not in html
