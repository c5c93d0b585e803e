// The scenarios of scenarios.py: `dotnet interop.dll azure|lite SCENARIO...`.
using Peeklock.Interop;
using Peeklock.Interop.Azure;
using Peeklock.Interop.Lite;

switch (args[0])
{
    case "azure":
        await AzureProgram.Run(args[1..]);
        break;
    case "lite":
        await LiteProgram.Run(args[1..]);
        break;
    default:
        throw new ArgumentException($"azure or lite, not {args[0]}");
}
