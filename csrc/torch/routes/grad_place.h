// Where a parameter's reduced gradient goes. Between sending and the end of the exchange the user may replace .grad,
// assign .grad.data or remove it. So a route notes what it has sent, and asks here once the result has arrived: as in
// Horovod, the reduced gradient is put into whatever .grad is then.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "core/base/status.h"

namespace poseidon {

// The type of a parameter's gradient: its own, or what the user set as its grad_dtype.
at::ScalarType GradType(const at::Tensor& param);
// For a new gradient of the parameter.
at::TensorOptions GradOptions(const at::Tensor& param);

// Same elements in the same places: a write to the one is a write to the other.
bool SameMemory(const at::Tensor& a, const at::Tensor& b);

// Makes `result`, the reduced gradient, visible in param.grad. had_grad: there was a .grad when it was sent.
// kFailedPrecondition if it has been removed since: nobody could tell whether this rank's update is to be left out, and
// the other ranks' is not.
Status PutGradient(const at::Tensor& param, const std::string& name, bool had_grad, const at::Tensor& result);

// kFailedPrecondition: as above, for a gradient that was in place already.
Status GradientRemoved(const std::string& name);

}  // namespace poseidon
