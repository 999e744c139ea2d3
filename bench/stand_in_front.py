"""`paceline prefill` or `paceline decode`, with an engine that computes nothing."""

from __future__ import annotations

import sys

from paceline.cli.entry import main
from paceline.services.decode.front import DecodeFront
from paceline.services.prefill.front import PrefillFront

if __name__ == "__main__":
    DecodeFront.engine_module = PrefillFront.engine_module = "stand_in_engine"
    sys.exit(main())
