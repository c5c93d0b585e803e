"""How settings are named in the environment. Imported before anything heavy is: keep it light."""

VARIABLE_PREFIX = "PEEKLOCK_"  # of all settings in the environment
CONFIG_VARIABLE = "PEEKLOCK_CONFIG"
