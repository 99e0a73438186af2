// TCP incast in ns-3: N senders, one switch, one receiver; every link has the same rate. Prints the seconds from the
// first start until the last byte has arrived, once per seed.
//
//   ns3_incast --senders=16 --bytes=1000000 --rate=100Mbps --delay=20us --queue=100 --seeds=5

#include <iostream>
#include <string>
#include <vector>

#include "ns3/applications-module.h"
#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

using namespace ns3;

static uint64_t g_received = 0;
static uint64_t g_expected = 0;

static void
Received(Ptr<const Packet> packet, const Address&)
{
    g_received += packet->GetSize();
    if (g_received >= g_expected)
    {
        Simulator::Stop();
    }
}

static double
Incast(uint32_t senders, uint64_t bytes, const std::string& rate, const std::string& delay, uint32_t queue, uint32_t seed)
{
    RngSeedManager::SetSeed(1);
    RngSeedManager::SetRun(seed);
    g_received = 0;
    g_expected = senders * bytes;
    NodeContainer hosts(senders);
    NodeContainer hub(2); // the switch and the receiver
    PointToPointHelper link;
    link.SetDeviceAttribute("DataRate", StringValue(rate));
    link.SetChannelAttribute("Delay", StringValue(delay));
    // All queueing happens in the device: no queue discipline above it.
    link.SetQueue("ns3::DropTailQueue", "MaxSize", StringValue(std::to_string(queue) + "p"));
    InternetStackHelper stack;
    stack.Install(hosts);
    stack.Install(hub);
    Ipv4AddressHelper address("10.0.0.0", "255.255.255.0");
    NetDeviceContainer last = link.Install(hub.Get(0), hub.Get(1));
    TrafficControlHelper none;
    Ipv4InterfaceContainer sink = address.Assign(last);
    none.Uninstall(last);
    ApplicationContainer apps;
    Ptr<UniformRandomVariable> jitter = CreateObject<UniformRandomVariable>();
    const uint16_t port = 9000;
    for (uint32_t i = 0; i < senders; i++)
    {
        address.NewNetwork();
        NetDeviceContainer devices = link.Install(hosts.Get(i), hub.Get(0));
        address.Assign(devices);
        none.Uninstall(devices);
        BulkSendHelper source("ns3::TcpSocketFactory", InetSocketAddress(sink.GetAddress(1), port));
        source.SetAttribute("MaxBytes", UintegerValue(bytes));
        ApplicationContainer app = source.Install(hosts.Get(i));
        app.Start(Seconds(jitter->GetValue(0.0, 0.001)));
        apps.Add(app);
    }
    PacketSinkHelper receiver("ns3::TcpSocketFactory", InetSocketAddress(Ipv4Address::GetAny(), port));
    ApplicationContainer sinkApp = receiver.Install(hub.Get(1));
    sinkApp.Start(Seconds(0.0));
    sinkApp.Get(0)->TraceConnectWithoutContext("Rx", MakeCallback(&Received));
    Ipv4GlobalRoutingHelper::PopulateRoutingTables();
    Simulator::Stop(Seconds(600.0));
    Simulator::Run();
    double end = g_received >= g_expected ? Simulator::Now().GetSeconds() : -1.0;
    Simulator::Destroy();
    return end;
}

int
main(int argc, char* argv[])
{
    uint32_t senders = 3;
    uint64_t bytes = 1000000;
    uint32_t queue = 100;
    uint32_t seeds = 5;
    std::string rate = "100Mbps";
    std::string delay = "20us";
    CommandLine cmd;
    cmd.AddValue("senders", "hosts that send", senders);
    cmd.AddValue("bytes", "bytes from each", bytes);
    cmd.AddValue("rate", "of every link", rate);
    cmd.AddValue("delay", "of every link", delay);
    cmd.AddValue("queue", "packets that a port can hold", queue);
    cmd.AddValue("seeds", "repetitions with other start times", seeds);
    cmd.Parse(argc, argv);
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(1448));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(4 << 20));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(4 << 20));
    for (uint32_t seed = 1; seed <= seeds; seed++)
    {
        std::cout << Incast(senders, bytes, rate, delay, queue, seed) << std::endl;
    }
    return 0;
}
