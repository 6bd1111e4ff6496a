#!/bin/sh
# The C++ compiler ($EMULATED_CXX) for the sources of `gdn run --emulate`, except for races.cpp with the calls that it answers.
case " $* " in
*" -c "*races.cpp*) ;;
*" -c "*) set -- "$@" -fsanitize=thread -include emulated.h ;;
esac
exec $EMULATED_CXX "$@" -O1 -g -w -DEMULATED_RACES -DEMULATED_THROWS -ldl
