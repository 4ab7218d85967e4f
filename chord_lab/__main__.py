"""``chord-lab`` and ``python -m chord_lab``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; say in one line when the workbench extra is not installed. Ctrl-C ends it with 130."""
    try:
        _main()
    except KeyboardInterrupt:
        sys.exit(130)


def _main() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"chord-lab: {error.name} is not installed; the workbench needs its extra: pip install 'chord-lab[lab]'"
        )
    from chord_lab.cli import run

    run()


if __name__ == "__main__":
    main()
