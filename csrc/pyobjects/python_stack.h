// The line of Python that a collective was started from.
#pragma once

#include <string>
#include <vector>

#include "comm/call_site.h"

namespace funcol::python {

// "/home/me/train.py:41 in step": where this thread is in Python, outside of the folders of libraries. Null
// on a thread that runs no Python, and where all of it is in those folders. Takes the GIL.
Text find_caller();

// Files below these folders are passed by. Needs the GIL.
void set_library_folders(std::vector<std::string> folders);

}  // namespace funcol::python
