"""This program starts a program on a host: arguments USER_FD NET_FD PARENT PROGRAM ARGUMENT….

It has one thread, because only such a process may enter a user namespace.
USER_FD is -1 where there is none, PARENT 0 where the program may outlive the thread that starts
it.
"""

from __future__ import annotations

import os
import sys

from gradwire_lab.network.kernel import CLONE_NEWNET, CLONE_NEWUSER, die_with_parent, setns


def main(arguments: list[str]) -> None:
    """Enter the namespaces and become the program."""
    user, network, parent = (int(text) for text in arguments[:3])
    program = arguments[3:]
    if user >= 0:
        setns(user, CLONE_NEWUSER)
        os.close(user)
    setns(network, CLONE_NEWNET)
    os.close(network)
    if parent:
        die_with_parent(parent)  # setns clears this setting, so it comes after
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"gradwire lab: cannot start {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
