// Writes the collectives in flight to a file at a signal, whatever the process is doing.
//
// A rank that hangs is mostly blocked in C++, where Python runs no signal handlers. The handler here only
// notifies a thread of its own, which writes without the GIL. Works on devices are not queried, since a
// device that hangs may not answer.
#pragma once

namespace funcol {

// Makes each `signal` write to the file descriptor, which has to stay open. The previous handler is called as
// well. Raises RuntimeError, with the system's reason, if the signal takes no handler.
void dump_in_flight_on(int signal, int file_descriptor);

// Restores the previous handler. Returns false if dump_in_flight_on() was not called for the signal.
bool stop_dumping_in_flight_on(int signal);

// Restarts the thread in a forked child, which starts without it, so that a signal writes there, too.
void follow_fork_of_dumps();

}  // namespace funcol
