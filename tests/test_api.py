"""docs/api.md has every public name, one line each. `python tests/test_api.py` writes it."""

import importlib
import inspect
import re

from conftest import ROOT, jitted

MODULES = ("gbcore", "gbcore.sb3", "gbcore.run")
HEAD = """# gbcore's public names

**A graph, a replay that feeds it, and targets over it: `TransitionGraph`, `Replay`, `q_targets`.**
Everything else is for speed, for other agents, or for runs. Shapes, dtypes and errors stand in the
docstrings: `help(gbcore.TransitionGraph.expand)`.
"""


def signature(function, is_method=False):
    """Names and defaults: (nodes, actions, depth, breadth=0, rng=None)."""
    empty = inspect.Parameter.empty
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    plain = [parameter.replace(annotation=empty) for parameter in parameters]
    return str(inspect.Signature(plain)).replace("<class '", "").replace("'>", "")


def summary(thing):
    """The docstring's first sentence."""
    about = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", about)[0].rstrip(":").rstrip(".")


def line(name, thing, indent="", is_method=False):
    function = getattr(thing, "__func__", thing)  # of a class method
    has_signature = inspect.isclass(thing) or inspect.isfunction(function)
    typed = name + (signature(function, is_method) if has_signature else "")
    is_documented = has_signature or isinstance(thing, property)
    return f"{indent}- `{typed}`" + (f": {summary(function)}" if is_documented else "")


def page():
    lines = [HEAD]
    for module in map(importlib.import_module, MODULES):
        defined = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        public = getattr(module, "__all__", [name for name in defined if not name.startswith("_")])
        lines += [f"\n## {module.__name__}\n", f"{summary(module)}.\n"]
        for name in sorted(public, key=str.lower):
            thing = getattr(module, name)
            lines.append(line(name, thing))
            for member, of in vars(thing).items() if inspect.isclass(thing) else ():
                kinds = property, classmethod, staticmethod
                if not member.startswith("_") and (inspect.isfunction(of) or isinstance(of, kinds)):
                    lines.append(line(member, of, "  ", is_method=True))
    return "\n".join(lines) + "\n"


@jitted
def test_the_page_is_complete():
    assert (ROOT / "docs" / "api.md").read_text() == page(), "python tests/test_api.py writes it"


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page())
