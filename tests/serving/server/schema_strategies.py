"""Hypothesis strategies for values of a JSON schema."""

from hypothesis import strategies as st

TEXTS = st.text(max_size=6) | st.sampled_from(["a", "self", "messages", "\n", "é", "😀", "{", "<tool_call>"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def values(schema, shared):
    """Return a strategy for values of a schema; `shared` contains the schemas that it references."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return st.deferred(lambda: values(shared[name], shared))
    if "anyOf" in schema:
        return st.one_of([values(option, shared) for option in schema["anyOf"]])
    for name in ("enum", "const"):
        if name in schema:
            return st.sampled_from(schema[name]) if name == "enum" else st.just(schema[name])
    make = {
        "null": st.none,
        "boolean": st.booleans,
        "string": lambda: TEXTS,
        "integer": lambda: integers(schema),
        "number": lambda: st.sampled_from([0, 1, 0.5, 1, 0.25, -1, 1e9]),
        "array": lambda: st.lists(
            values(schema.get("items", {}), shared), min_size=schema.get("minItems", 0), max_size=3
        ),
        "object": lambda: objects(schema, shared),
    }
    return make[schema["type"]]() if "type" in schema else JUNK


def integers(schema):
    """Return a strategy for mostly small integers, which are often valid."""
    first, last = schema.get("minimum", -1), schema.get("maximum", 2**63)
    return st.integers(max(first, 0), 9) | st.sampled_from(sorted({first, min(last, 400), last}))


def objects(schema, shared, only=None):
    """Return a strategy for objects with the required and some optional properties."""
    properties = schema.get("properties")
    if properties is None:
        inner = schema.get("additionalProperties")
        return st.dictionaries(TEXTS, values(inner, shared) if isinstance(inner, dict) else JUNK, max_size=3)
    required = schema.get("required", [])
    drawn = {
        name: values(prop, shared)
        for name, prop in properties.items()
        if only is None or name in only or name in required
    }
    names = st.lists(st.sampled_from(sorted(drawn)), max_size=5, unique=True)
    chosen = names.map(lambda names: [*required, *(name for name in names if name not in required)])
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: drawn[name] for name in names}))
