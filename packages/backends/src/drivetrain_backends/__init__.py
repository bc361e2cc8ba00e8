"""DDP and single-device training behind one protocol, with its contract test."""
