// Writes the collectives in flight to a file at a signal, whatever the process is doing.
//
// A rank that hangs is mostly blocked in C++, where Python runs no signal handlers. The handler here only
// tells a thread of its own, which writes without the GIL. Works on devices are not asked whether they are
// over, since a device that hangs may not answer.
#pragma once

namespace funcol {

// From now on each `signal` writes to the file descriptor, which has to stay open. A handler that was there
// before is called as well. RuntimeError, with the system's reason, if the signal takes no handler.
void dump_in_flight_on(int signal, int file_descriptor);

// Puts the handler back that was there before. False if dump_in_flight_on() was not called for the signal.
bool stop_dumping_in_flight_on(int signal);

// To be called in a forked child, which starts without the thread: a signal writes there, too.
void follow_fork_of_dumps();

}  // namespace funcol
