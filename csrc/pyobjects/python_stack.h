// The line of Python that a collective was started from.
#pragma once

#include <string>
#include <vector>

#include "comm/call_site.h"

namespace funcol::python {

// Returns where this thread is in Python, outside of library folders: "/home/me/train.py:41 in step". Returns
// null on a thread that runs no Python, and if all of it is in those folders. Takes the GIL.
Text find_caller();

// Sets the library folders, whose files find_caller() skips. Needs the GIL.
void set_library_folders(std::vector<std::string> folders);

}  // namespace funcol::python
