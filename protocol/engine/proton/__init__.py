"""Makes up for the peculiarities of proton, which docs/design/proton.md lists."""
