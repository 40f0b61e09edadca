"""Shaping launches: the shim in C, its Python face, attaching it and proving that it took effect.

::

    attach.ensure_attached() -> Attachment(shim) -> shim.push(policy) ... shim.pop(token)
      conflicts, verify            ctypes                _shim/ (C)
"""
