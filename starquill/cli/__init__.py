"""The `starquill` command: one module per verb."""
