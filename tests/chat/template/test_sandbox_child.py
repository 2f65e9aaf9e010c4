"""Hostile templates get an error within the time limit, and the next rendering works."""

from __future__ import annotations

import contextlib
import os

import pytest

from afterglow.chat.messages import parse_messages
from afterglow.chat.template import renderer
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.errors import InvalidTemplate

pytestmark = pytest.mark.slow

CONVERSATION = parse_messages([("user", "Hello")])
BIG = 10**10

HOSTILE = {
    # time
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a long text": "{% for a in 'x' * 99999999 %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a number that grows": "{% set n = namespace(x=9) %}"
    "{% for a in range(99999) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a power": "{{ 99999 ** 9999999 }}",
    "a sort of many": "{{ (range(99999) | list * 999) | sort | length }}{{ raise_exception('done') }}",
    "a loop before an exception": "{% for a in range(9999) %}{% for b in range(999) %}{% endfor %}{% endfor %}"
    "{{ raise_exception('late') }}",
    # memory
    "a range bomb": f"{{{{ range({BIG}) | list }}}}",
    "a long text": f"{{{{ 'x' * {BIG} }}}}",
    "a text that doubles": "{% set n = namespace(x='x') %}"
    "{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a list that doubles": "{% set n = namespace(x=[1]) %}"
    "{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a list of its own that grows": "{% set x = [1] %}{% for a in range(99) %}{% set _ = x.extend(x) %}{% endfor %}",
    "a wide centre": f"{{{{ 'x' | center({BIG}) }}}}",
    "a wide indentation": f"{{{{ 'x\n' | indent({BIG}, first=true) }}}}",
    "a wide format": f"{{{{ '%{BIG}d' % 1 }}}}",
    "a wide format method": f"{{{{ '{{:>{BIG}}}'.format(1) }}}}",
    "a long join": "{{ range(99999) | join('x' * 99999) }}",
    "a long replacement": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "a deep JSON": "{% set n = namespace(x=[]) %}{% for a in range(99999) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ n.x | tojson }}",
    "a padded batch": f"{{{{ [1] | batch({BIG}, 'x') | list }}}}",
    # size
    "endless output": "{% for a in range(99999) %}{% for b in range(999) %}xxxxxxxxxxxx{% endfor %}{% endfor %}",
    "one huge piece": "{{ 'x' * 99999999 }}",
    "endless lorem ipsum": "{{ lipsum(n=99999) }}",
    # recursion
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros in a circle": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    # the interpreter
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a class by its item": "{{ ''['__class__']['__mro__'] }}",
    "a class by a filter": "{{ ('' | attr('__class__') | attr('__mro__'))[1] }}",
    "a class by pieces of its name": "{{ ('' | attr('__cla' ~ 'ss__')).mro() }}",
    "a class by escaped letters": "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'].mro() }}",
    "a class by wide letters": "{{ ''.\uff3f\uff3fclass\uff3f\uff3f.mro() }}",
    "a class by a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "a class by a mapped format": "{{ '{x.__class__.__init__.__globals__}'.format_map({'x': messages}) }}",
    "a class by a mapped attribute": "{{ [''] | map(attribute='__class__') | first | attr('mro') }}{{ [].y.z }}",
    "globals of a global": "{{ lipsum.__globals__['os'].environ }}",
    "globals of a class": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of a namespace": "{{ namespace.__init__.__globals__.sys.modules }}",
    "globals of the clock": "{{ strftime_now.__globals__['sys'].modules }}",
    "the frame of a generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "the code of a macro": "{% macro f() %}{% endmacro %}{{ f._func.__code__.co_consts }}",
    "itself": "{{ self.__init__.__globals__['os'].system('true') }}",
    "itself by its name": "{{ self._TemplateReference__context.environment.loader }}",
    "its loop": "{% for m in messages %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    # files
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}{{ x }}",
    "a from": "{% from 'os' import environ %}{{ environ }}",
    "an extension": "{% extends '/etc/passwd' %}",
    "an opened file": "{{ open('/etc/passwd').read() }}",
    # input
    "its input appended to": "{{ messages.append(1) }}",
    "its input cleared": "{{ messages[0].clear() }}",
    "its input replaced": "{{ messages[0].update({'role': 'system'}) }}",
    # nonsense
    "a syntax error": "{% for %}",
    "a block that stays open": "{% if true %}",
    "an unknown tag": "{% evil %}",
    "an unknown filter": "{{ 1 | evil }}",
    "an unknown function": "{{ evil() }}",
    "a division by zero": "{{ 1 / 0 }}",
    "a surrogate": "{{ '\\ud800' }}",
}


def get_child_cpu_seconds() -> float:
    """CPU time of the children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_gets_an_error_and_the_next_rendering_works(name, monkeypatch):
    monkeypatch.setattr(renderer, "RENDER_CPU_SECONDS", 2.0)
    with ChatTemplate(HOSTILE[name]) as template:
        started = get_child_cpu_seconds()
        with pytest.raises(InvalidTemplate):
            template.render(CONVERSATION)
        assert get_child_cpu_seconds() - started < renderer.RENDER_CPU_SECONDS + 1
        template.source = "{{ messages[0].content }}"
        assert template.render(CONVERSATION) == "Hello"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__}'.format('') }}",
        "{{ lipsum.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ environ }}{{ os }}{{ __builtins__ }}{{ __import__ }}",
        "{{ messages.__class__ }}{{ tojson.__globals__ }}",
    ],
)
def test_python_internals_are_undefined_in_templates(source):
    """Jinja renders an undefined value as empty text, or raises an error."""
    with ChatTemplate(source) as template, contextlib.suppress(InvalidTemplate):
        assert template.render(CONVERSATION) == ""


def test_the_time_limit_covers_all_attempts(monkeypatch):
    """A template is rendered several times; the limit applies to all attempts together."""
    monkeypatch.setattr(renderer, "RENDER_CPU_SECONDS", 1.0)
    slow = "{% for a in range(999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{{ raise_exception('late') }}"
    with ChatTemplate(slow) as template:
        started = get_child_cpu_seconds()
        with pytest.raises(InvalidTemplate):
            template.render(parse_messages([("system", "a"), ("user", "b"), ("user", "c")]))
        assert get_child_cpu_seconds() - started < 2


def test_an_interrupted_rendering_does_not_affect_the_next(monkeypatch):
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.render(CONVERSATION) == "Hello"

        def interrupt(child, request, deadline):  # the reply is still pending
            child.stdin.write(request)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(renderer, "exchange_line", interrupt)
            with pytest.raises(KeyboardInterrupt):
                template.render(parse_messages([("user", "one")]))
        assert template.render(parse_messages([("user", "two")])) == "two"
