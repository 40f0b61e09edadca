"""The tuner's memory: one readable JSON file per machine and software stack.

::

    Device -> ProfileKey -> ProfileStore.load -> Profile | Miss (which fields differ)
    verdicts -> ProfileStore.merge -> combined policy -> file, replaced atomically
"""

from overlapctl.profiles.combine import combine_verdicts
from overlapctl.profiles.key import FieldDifference, differences, profile_key
from overlapctl.profiles.schema import SCHEMA, VERSION, dump_profile, parse_profile
from overlapctl.profiles.store import Entry, Miss, ProfileStore, default_folder

__all__ = [
    "SCHEMA",
    "VERSION",
    "Entry",
    "FieldDifference",
    "Miss",
    "ProfileStore",
    "combine_verdicts",
    "default_folder",
    "differences",
    "dump_profile",
    "parse_profile",
    "profile_key",
]
