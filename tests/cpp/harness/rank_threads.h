#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fold3d::test {

/// Runs `body` on a thread for each of `count` ranks; returns the texts of their errors, or empty ones.
std::vector<std::string> run_on_threads(int count, const std::function<void(int rank)>& body);

}  // namespace fold3d::test
