"""`python -P -m paceline.cli`, which is how `paceline up` starts its roles: it needs no script on the PATH."""

import sys

from paceline.cli import main

sys.exit(main())
