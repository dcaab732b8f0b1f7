"""Tools that come with the package, by name. Their source runs in the sandbox like any other tool's."""


def calc(expression: str):
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as 2*(3+4).
    """
    import ast
    import operator

    operators = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
        ast.UAdd: operator.pos,
    }  # fmt: skip

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return operators[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in operators:
            return operators[type(node.op)](value(node.operand))
        raise ValueError("this is not arithmetic")

    return str(value(ast.parse(expression.strip(), mode="eval").body))


def python(code: str):
    """Run Python code and see what it prints.

    Args:
        code: a program; nothing is kept from one call to the next.
    """
    exec(compile(code, "code.py", "exec"), {"__name__": "__main__"})
