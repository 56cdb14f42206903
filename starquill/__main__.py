"""`python -m starquill` is the `starquill` command."""

from starquill.cli.app import main

raise SystemExit(main())
