"""`python -m foretoken`."""

from foretoken.cli.main import main

main()
