// The schemes of this process. A scheme of the product is one line in registry.cc; a test adds its own with Register().
#pragma once

#include <cstddef>
#include <memory>

#include "core/schemes/rule.h"
#include "core/schemes/scheme.h"

namespace poseidon {

// Any thread.
size_t SchemeCount();
const SchemeRule& RuleOf(Scheme scheme);

// Before any other thread uses schemes. Ends the process if a scheme of that name exists. The result's place is
// SchemeCount() - 1.
Scheme Register(std::unique_ptr<const SchemeRule> rule);

}  // namespace poseidon
